"""Page ids, their reference counts and states, and who may write which slot. Holds no tensors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int64]


class CacheError(RuntimeError):
    """A call outside the contract; nothing was changed."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by state; each page is in exactly one, so the four sum to `total`."""

    total: int
    free: int
    cached: int
    referenced: int
    pinned: int


class PagePool:
    """The state of pages 0..num_pages-1, one numpy cell per page and fact.

    refs: live page tables that list the page, plus copies in flight from it.
    pins: leases that hold the page, which is then listed too.
    listed: a node of the radix tree lists it. A page is referenced while refs > 0, else pinned
    while pins > 0, else cached while listed, else free; dropping the last of these frees it at
    once.
    owned: a live table is the page's append owner. sealed: slots 0..sealed-1 may be read by
    others than the owner (published or forked) and are never written again while the page lives.

    Methods take ids without duplicates and cost O(ids); counts are O(1).
    """

    def __init__(self, num_pages: int) -> None:
        self.refs = np.zeros(num_pages, dtype=np.int32)
        self.pins = np.zeros(num_pages, dtype=np.int32)
        self.listed = np.zeros(num_pages, dtype=np.bool_)
        self.owned = np.zeros(num_pages, dtype=np.bool_)
        self.sealed = np.zeros(num_pages, dtype=np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._num_free = num_pages
        self._num_referenced = 0
        self._num_pinned = 0
        self._num_pins = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        return len(self.refs) - self._num_free - self._num_referenced - self._num_pinned

    @property
    def free_ids(self) -> PageIds:
        """A view of the free list, the next page to be given out last."""
        return self._free[: self._num_free]

    def counts(self) -> PoolCounts:
        return PoolCounts(
            total=len(self.refs),
            free=self._num_free,
            cached=self.num_cached,
            referenced=self._num_referenced,
            pinned=self._num_pinned,
        )

    def allocate(self, num_pages: int) -> PageIds:
        """Take free pages: one reference each, owned, unsealed. Raises CacheError if short."""
        if num_pages > self._num_free:
            raise CacheError(f"{num_pages} pages wanted, {self._num_free} free")
        self._num_free -= num_pages
        pages = self._free[self._num_free : self._num_free + num_pages][::-1].copy()
        self.refs[pages] = 1
        self.owned[pages] = True
        self._num_referenced += num_pages
        return pages

    def ref(self, pages: PageIds) -> None:
        """Add a reference to each page; none of them may be free."""
        refs = self.refs[pages]
        self.refs[pages] = refs + 1
        self._num_referenced += len(refs) - int(np.count_nonzero(refs))
        if self._num_pinned:
            self._num_pinned -= int(np.count_nonzero(self.pins[pages[refs == 0]]))

    def unref(self, pages: PageIds) -> None:
        """Drop a reference of each page. Raises CacheError if one has none."""
        refs = self.refs[pages] - 1
        idle = pages[refs <= 0]
        if len(idle) and int(refs.min()) < 0:
            raise CacheError(f"pages {pages[refs < 0].tolist()} have no reference to drop")
        self.refs[pages] = refs
        self._num_referenced -= len(idle)
        if self._num_pins:
            self._num_pinned += int(np.count_nonzero(self.pins[idle]))
        self._reclaim(idle[~self.listed[idle]])

    def pin(self, pages: PageIds) -> None:
        """A lease holds these pages, which a tree lists."""
        fresh = pages[self.pins[pages] == 0]
        self.pins[pages] += 1
        self._num_pins += len(pages)
        self._num_pinned += int(np.count_nonzero(self.refs[fresh] == 0))

    def unpin(self, pages: PageIds) -> None:
        """A lease ends. Raises CacheError if one of the pages has none."""
        pins = self.pins[pages] - 1
        if len(pins) and int(pins.min()) < 0:
            raise CacheError(f"pages {pages[pins < 0].tolist()} have no lease to end")
        self.pins[pages] = pins
        self._num_pins -= len(pages)
        self._num_pinned -= int(np.count_nonzero(self.refs[pages[pins == 0]] == 0))

    def is_held(self, pages: PageIds) -> NDArray[np.bool_]:
        """Which pages may not be evicted: a request reads them, or a lease holds them."""
        held: NDArray[np.bool_] = (self.refs[pages] > 0) | (self.pins[pages] > 0)
        return held

    def enlist(self, pages: PageIds) -> None:
        """The tree lists these pages now."""
        self.listed[pages] = True

    def delist(self, pages: PageIds) -> None:
        """The tree no longer lists these pages; those without references become free."""
        self.listed[pages] = False
        self._reclaim(pages[self.refs[pages] == 0])

    def recount(self, listed: PageIds, num_slots: NDArray[np.int32], pins: PageIds) -> None:
        """Begin anew with what the trees list, how many slots of each page they hold valid, and the
        pages of all leases, once for each; no table lives."""
        total = len(self.refs)
        self.refs[:] = 0
        self.owned[:] = False
        self.listed[:] = False
        self.listed[listed] = True
        self.sealed[:] = 0
        self.sealed[listed] = num_slots
        self.pins[:] = np.bincount(pins, minlength=total)
        free = np.flatnonzero(~self.listed)[::-1]
        self._free[: len(free)] = free
        self._num_free = len(free)
        self._num_referenced = 0
        self._num_pinned = int(np.count_nonzero(self.pins))
        self._num_pins = len(pins)

    def seal(self, page: int, num_slots: int) -> None:
        """Others may read the first `num_slots` slots from now on; never shrinks."""
        self.sealed[page] = max(int(self.sealed[page]), num_slots)

    def may_append(self, page: int, slot: int) -> bool:
        """Whether a holder that continues at `slot` may become the page's append owner.

        True only where nobody is and everything readable ends there.
        """
        return not self.owned[page] and int(self.sealed[page]) == slot

    def _reclaim(self, pages: PageIds) -> None:
        self.owned[pages] = False
        self.sealed[pages] = 0
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

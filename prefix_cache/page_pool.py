"""Page ids, their reference counts and states, and who may write which slot. Holds no tensors."""

from dataclasses import dataclass
from typing import Protocol

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


class Coverage(Protocol):
    """Which listed pages live tables hold through the trees."""

    def is_covered(self, page: int) -> bool:
        """Whether any table holds the page so."""

    def count_covered(self, path: PageIds) -> int:
        """How many pages of a path, which are its first ones."""


class PagePool:
    """The state of pages 0..num_pages-1, one numpy cell per page and fact.

    refs: live page tables that list the page and do not hold it through a tree, plus copies in
    flight from it. Those that tables hold through a tree are covered: all full pages of a table.
    pins: leases that hold the page, which is then listed too.
    listed: a node of the radix tree lists it. A page is referenced while it is covered or
    refs > 0, else pinned while pins > 0, else cached while listed, else free; dropping the last of
    these frees it at once.
    owned: a live table is the page's append owner. sealed: slots 0..sealed-1 may be read by
    others than the owner (published or forked) and are never written again while the page lives.

    Methods take ids without duplicates and cost O(ids); counts are O(1).
    """

    def __init__(self, num_pages: int, coverage: Coverage) -> None:
        self._coverage = coverage
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
        self._num_listed_refs = 0

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
        fresh = pages[refs == 0]
        self.refs[pages] = refs + 1
        self._num_listed_refs += int(np.count_nonzero(self.listed[fresh]))
        self._count_referenced(self._uncovered(fresh), 1)

    def unref(self, pages: PageIds) -> None:
        """Drop a reference of each page. Raises CacheError if one has none."""
        refs = self.refs[pages] - 1
        idle = pages[refs <= 0]
        if len(idle) and int(refs.min()) < 0:
            raise CacheError(f"pages {pages[refs < 0].tolist()} have no reference to drop")
        self.refs[pages] = refs
        listed = self.listed[idle]
        self._num_listed_refs -= int(np.count_nonzero(listed))
        self._count_referenced(self._uncovered(idle), -1)
        self._reclaim(idle[~listed])

    def cover(self, pages: PageIds) -> None:
        """Tables begin to hold these listed pages through a tree. O(1) unless references or leases
        stand on listed pages."""
        self._count_referenced(self._without_refs(pages), 1)

    def uncover(self, pages: PageIds) -> None:
        """No table holds these listed pages through a tree any more."""
        self._count_referenced(self._without_refs(pages), -1)

    def share(self, pages: PageIds, num_slots: int) -> None:
        """A tree lists these pages of a table now, whole and read-only, and the table's own
        reference goes: the caller covers them at once."""
        self._num_listed_refs -= int(np.count_nonzero(self.listed[pages]))
        refs = self.refs[pages] - 1
        self.refs[pages] = refs
        left = int(np.count_nonzero(refs))
        self._num_listed_refs += left
        self._num_referenced -= len(refs) - left
        self.listed[pages] = True
        self.sealed[pages] = num_slots
        self.owned[pages] = False

    def pin(self, pages: PageIds) -> None:
        """A lease holds these pages, a path from a root on."""
        fresh = self.pins[pages] == 0
        self.pins[pages] += 1
        self._num_pins += len(pages)
        self._num_pinned += self._count_idle(pages, fresh)

    def unpin(self, pages: PageIds) -> None:
        """A lease ends. Raises CacheError if one of the pages has none."""
        pins = self.pins[pages] - 1
        if len(pins) and int(pins.min()) < 0:
            raise CacheError(f"pages {pages[pins < 0].tolist()} have no lease to end")
        self.pins[pages] = pins
        self._num_pins -= len(pages)
        self._num_pinned -= self._count_idle(pages, pins == 0)

    def is_held(self, pages: PageIds) -> NDArray[np.bool_]:
        """Which pages may not be evicted though they are not covered: somebody reads them, or a
        lease holds them."""
        held: NDArray[np.bool_] = (self.refs[pages] > 0) | (self.pins[pages] > 0)
        return held

    def enlist(self, pages: PageIds) -> None:
        """The tree lists these pages now."""
        fresh = pages[~self.listed[pages]]
        self.listed[fresh] = True
        self._num_listed_refs += int(np.count_nonzero(self.refs[fresh]))

    def delist(self, pages: PageIds) -> None:
        """The tree no longer lists these pages, which are not covered; those without references
        become free."""
        self.listed[pages] = False
        idle = self.refs[pages] == 0
        self._num_listed_refs -= len(pages) - int(np.count_nonzero(idle))
        self._reclaim(pages[idle])

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
        self._num_listed_refs = 0
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

    def _uncovered(self, pages: PageIds) -> PageIds:
        listed = pages[self.listed[pages]].tolist()
        covered = [page for page in listed if self._coverage.is_covered(page)]
        return pages[~np.isin(pages, covered)] if covered else pages

    def _without_refs(self, pages: PageIds) -> PageIds:
        return pages[self.refs[pages] == 0] if self._num_listed_refs else pages

    def _count_referenced(self, pages: PageIds, sign: int) -> None:
        """These pages begin (1) or cease (-1) to be referenced."""
        self._num_referenced += sign * len(pages)
        if self._num_pins:
            self._num_pinned -= sign * int(np.count_nonzero(self.pins[pages]))

    def _count_idle(self, path: PageIds, chosen: NDArray[np.bool_]) -> int:
        """How many chosen pages of a path are not referenced."""
        start = self._coverage.count_covered(path)
        return int(np.count_nonzero(chosen[start:] & (self.refs[path[start:]] == 0)))

    def _reclaim(self, pages: PageIds) -> None:
        self.owned[pages] = False
        self.sealed[pages] = 0
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

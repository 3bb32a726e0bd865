"""The second tier: pages that were evicted from the device are kept on disk, and come back when
that is cheaper than computing them again.

Every page that takes part has an id of its own, given once for its contents: a page on disk is
found by the id of the page before it and its own tokens, compared one by one. So no hash decides,
and what an id's page held can be reached only through the very prefix it was computed for. Ids
of namespaces are where prefixes begin.

A page is in one tier at a time: on the device, on disk, or on its way back, when it can be read and
nothing else leads to it. Only `read` may be called on another thread.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefix_cache.key import Namespace
from prefix_cache.page_file import PageFile
from prefix_cache.radix_tree import Node, RadixForest, TokenIds

_FIRST_GUESS_BYTES_PER_MS: Final = 1e6
_WEIGHT: Final = 0.1
_MOST_ROOTS: Final = 65_536
"""Namespaces, salts among them; with one more, all begins anew."""


class Device(Protocol):
    """The memory of the device's pages."""

    def export_page(self, page: int) -> bytes:
        """What a page holds."""


@dataclass(frozen=True, slots=True)
class DiskPage:
    """A page on its way back: its id, where it is in the file, and what it must add up to.
    `epoch` counts how often everything was forgotten before."""

    id: int
    slot: int
    checksum: int
    epoch: int


@dataclass(eq=False, slots=True)
class _Record:
    """A page on disk."""

    parent: int
    tokens: bytes
    slot: int
    checksum: int


class DiskBook(msgspec.Struct, frozen=True):
    """What a kept file holds, for the tier that takes it over: where namespaces begin (by their
    place in a list of names), and each page's id, parent, tokens, slot and checksum."""

    file: str
    num_slots: int
    next_id: int
    roots: tuple[tuple[int, int], ...]
    records: tuple[tuple[int, int, bytes, int, int], ...]


class DiskTier:
    """Which pages are in the file, and what leads to them. Of a file that is kept, a snapshot has
    the book, and the next process may take both over.

    The longest kept go first when it is full, each with all that only it leads to.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_device_pages: int,
        page_size: int,
        page_bytes: int,
        num_bytes: int,
        folder: Path | None = None,
        keep: bool = False,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Room for `num_bytes` in `folder`, by default the system's for temporary files; with
        `keep` the file has a name there. Raises OSError; ValueError where that is not a page."""
        num_slots = num_bytes // page_bytes
        if num_slots < 1:
            raise ValueError(f"{num_bytes} bytes hold no page of {page_bytes}")
        self._device = device
        self._page_size = page_size
        self._clock_s = clock_s
        self.file = PageFile(num_slots, page_bytes, folder, keep=keep)
        self._ids = np.zeros(num_device_pages, dtype=np.int64)
        self._next_id = 1
        self._roots: dict[Namespace, int] = {}
        self._records: dict[int, _Record] = {}
        self._below: dict[int, dict[bytes, int]] = {}
        self._returning: dict[int, int] = {}
        self._epoch = 0
        self._read_ms = page_bytes / _FIRST_GUESS_BYTES_PER_MS
        self._import_ms = 0.0
        self.num_restored = 0
        self.num_damaged = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def page_ms(self) -> float:
        """What bringing back a page takes, as lately measured."""
        return self._read_ms + self._import_ms

    def leave(self, forest: RadixForest, leaf: Node, num_kept: int) -> None:
        """The pages of the leaf behind the first `num_kept` are about to be cut: keep the full
        ones, and forget what was known of them as device pages."""
        num_full = leaf.num_tokens // self._page_size
        parent = self._id_before(forest, leaf, num_kept) if num_kept < num_full else 0
        for index in range(num_kept, leaf.num_pages):
            page = int(leaf.pages[index])
            if index < num_full:
                start = index * self._page_size
                tokens = leaf.tokens[start : start + self._page_size].tobytes()
                if parent:
                    parent = self._keep(page, parent, tokens)
                else:
                    self._orphan(int(self._ids[page]))
            self._ids[page] = 0

    def find(
        self, namespace: Namespace, tokens: TokenIds, after: int | None, num_pages: int
    ) -> int:
        """How many pages on disk go on from the first `num_pages` of a prompt, of which `after` is
        the last one on the device (None for no page)."""
        parent = self._roots.get(namespace, 0) if after is None else int(self._ids[after])
        count = 0
        while parent and (found := self._next(parent, tokens, num_pages + count)) is not None:
            parent = found
            count += 1
        return count

    def take_out(
        self, namespace: Namespace, tokens: TokenIds, after: int | None, index: int, count: int
    ) -> tuple[DiskPage, ...]:
        """Begin to bring back what `find` found, at most `count` pages; each is on its way until
        `land` is told of it."""
        parent = self._roots.get(namespace, 0) if after is None else int(self._ids[after])
        taken: list[DiskPage] = []
        while parent and len(taken) < count:
            found = self._next(parent, tokens, index + len(taken))
            if found is None:
                break
            record = self._unlink(found)
            self._returning[found] = record.slot
            taken.append(DiskPage(found, record.slot, record.checksum, self._epoch))
            parent = found
        return tuple(taken)

    def read(self, page: DiskPage) -> bytes | None:
        """What a page on its way holds; None where that is not what was written. May be called on
        any thread, which waits for the disk alone."""
        start_s = self._clock_s()
        data = self.file.read(page.slot, page.checksum)
        self._read_ms += _WEIGHT * ((self._clock_s() - start_s) * 1e3 - self._read_ms)
        return data

    def note_import(self, page_ms: float) -> None:
        """What it lately took to put a page that was read into the device's memory."""
        self._import_ms += _WEIGHT * (page_ms - self._import_ms)

    def is_current(self, pages: Sequence[DiskPage]) -> bool:
        """Whether nothing was forgotten since these were taken out."""
        return all(page.epoch == self._epoch for page in pages)

    def land(
        self, pages: Sequence[DiskPage], device_pages: Sequence[int], *, damaged: bool
    ) -> None:
        """End the way of these pages: the first of them are the device's now, in these pages; the
        rest is lost with all that only it leads to. `damaged`: the first lost one was not what was
        written."""
        if not self.is_current(pages):
            return
        for page, device_page in zip(pages, device_pages, strict=False):
            self.file.give_back(self._returning.pop(page.id))
            known = int(self._ids[device_page])
            if known:  # computed meanwhile, and known by another id
                self._adopt(page.id, known)
            else:
                self._ids[device_page] = page.id
        self.num_restored += len(device_pages)
        self.num_damaged += damaged
        for page in pages[len(device_pages) :]:
            self.file.give_back(self._returning.pop(page.id))
            self._orphan(page.id)

    def count_below(self, namespace: Namespace, pages: NDArray[np.int64], most: int) -> int:
        """How many pages on disk go on from any of these pages of the device, or, where there are
        none, from where the namespace's prefixes begin; `most` bounds the count and its time."""
        ids: list[int] = self._ids[pages].tolist() or [self._roots.get(namespace, 0)]
        pending = [each for each in ids if each in self._below]
        count = 0
        while pending and count < most:
            below = self._below.get(pending.pop(), {})
            count += len(below)
            pending += below.values()
        return min(count, most)

    def namespaces(self) -> Iterator[Namespace]:
        """Those of which whole prefixes are on disk, from their first page on."""
        return (name for name, root in self._roots.items() if root in self._below)

    def book(self, names: dict[Namespace, int]) -> DiskBook | None:
        """What a kept file holds now, all of it written; None where none is kept. Namespaces that
        `names` lacks are added to it."""
        if self.file.name is None:
            return None
        self.file.flush()
        return DiskBook(
            self.file.name,
            self.file.num_slots,
            self._next_id,
            tuple((names.setdefault(n, len(names)), each) for n, each in self._roots.items()),
            tuple(
                (each, record.parent, record.tokens, record.slot, record.checksum)
                for each, record in self._records.items()
            ),
        )

    def ids_of(self, pages: NDArray[np.int64]) -> tuple[int, ...]:
        """The ids of pages of the device, 0 for one that has none."""
        return tuple(self._ids[pages].tolist())

    def take_over(self, book: DiskBook, names: Sequence[Namespace]) -> str:
        """Go on with the file of a former tier, while this one is empty; why not, or "". The file
        gets a new name: a book that is older than what is in it leads nowhere. `know` is to be
        told of device pages, then `settle`."""
        if why_not := self.file.take_over(book.file, book.num_slots):
            return why_not
        self._next_id = book.next_id
        self._roots = {names[place]: each for place, each in book.roots}
        for each, parent, tokens, slot, checksum in book.records:
            self._records[each] = _Record(parent, tokens, slot, checksum)
            self._below.setdefault(parent, {})[tokens] = each
        self.file.use(record.slot for record in self._records.values())
        return ""

    def know(self, page: int, own: int) -> None:
        """A page of the device has the id it had before."""
        self._ids[page] = own

    def settle(self) -> int:
        """Drop the pages that nothing leads to, and files that former processes left; how many
        pages."""
        reached = [*self._roots.values(), *self._ids[self._ids > 0].tolist()]
        seen: set[int] = set()
        while reached:
            each = reached.pop()
            seen.add(each)
            reached += self._below.get(each, {}).values()
        lost = [each for each in self._records if each not in seen]
        for each in lost:
            self._forget(each)
        self.file.remove_others()
        return len(lost)

    def clear(self) -> None:
        """Forget everything on disk, and what leads there from the device."""
        self.file.clear()
        self._records.clear()
        self._below.clear()
        self._returning.clear()
        self._roots.clear()
        self._ids[:] = 0
        self._epoch += 1

    def differences(self) -> Iterator[str]:
        """Every way in which the tier's own books disagree."""
        slots = [record.slot for record in self._records.values()]
        slots += [*self._returning.values(), *self.file.unused()]
        if sorted(slots) != list(range(self.file.num_slots)):
            yield "disk: a slot is lost, or held twice"
        linked = {
            (parent, tokens): each
            for parent, below in self._below.items()
            for tokens, each in below.items()
        }
        held = {(record.parent, record.tokens): each for each, record in self._records.items()}
        if linked != held:
            yield "disk: pages and the way to them differ"
        reachable = {
            *self._records,
            *self._returning,
            *self._roots.values(),
            *self._ids[self._ids > 0].tolist(),
        }
        if lost := self._below.keys() - reachable:
            yield f"disk: {len(lost)} pages have nothing before them"

    def _next(self, parent: int, tokens: TokenIds, index: int) -> int | None:
        start = index * self._page_size
        wanted = tokens[start : start + self._page_size].tobytes()
        return self._below.get(parent, {}).get(wanted)

    def _id_before(self, forest: RadixForest, leaf: Node, num_kept: int) -> int:
        """The id of the page before a place in a node, given now if it has none."""
        if num_kept:
            return self._id_of(int(leaf.pages[num_kept - 1]))
        above = leaf.parent
        if above is not None and above.num_pages:
            return self._id_of(int(above.pages[-1]))
        name = forest.namespace_of(leaf)
        if name not in self._roots:
            if len(self._roots) >= _MOST_ROOTS:
                self.clear()
            self._roots[name] = self._new_id()
        return self._roots[name]

    def _id_of(self, page: int) -> int:
        if not self._ids[page]:
            self._ids[page] = self._new_id()
        return int(self._ids[page])

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _keep(self, page: int, parent: int, tokens: bytes) -> int:
        """Write a page; its id, 0 if there is no room. Where the same page is on disk already,
        that one stays."""
        own = int(self._ids[page])
        known = self._below.get(parent, {}).get(tokens)
        if known is not None:
            self._adopt(own, known)
            return known
        own = own or self._new_id()
        slot = self._take_slot(own, parent)
        if slot is None:
            self._orphan(own)
            return 0
        checksum = self.file.write(slot, self._device.export_page(page))
        self._records[own] = _Record(parent, tokens, slot, checksum)
        self._below.setdefault(parent, {})[tokens] = own
        return own

    def _take_slot(self, *kept: int) -> int | None:
        """A place for a page, if need be that of the page kept longest; never one of these."""
        slot = self.file.take()
        if slot is None and self._make_room(*kept):
            slot = self.file.take()
        return slot

    def _make_room(self, *kept: int) -> bool:
        """Drop the page kept longest, but none that leads to one of these; whether there is one."""
        spared = set(kept)
        for each in kept:
            while (record := self._records.get(each)) is not None:
                each = record.parent
                spared.add(each)
        oldest = next((each for each in self._records if each not in spared), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _adopt(self, own: int, known: int) -> None:
        """What goes on from a page goes on from its twin on disk."""
        for tokens, each in self._below.pop(own, {}).items():
            if tokens in self._below.get(known, {}):
                self._drop(each)
                continue
            self._records[each].parent = known
            self._below.setdefault(known, {})[tokens] = each

    def _orphan(self, own: int) -> None:
        """Nothing leads to a page any more: drop what goes on from it."""
        for each in list(self._below.get(own, {}).values()):
            self._drop(each)

    def _drop(self, own: int) -> None:
        """Forget a page and all that only it leads to."""
        pending = [own]
        while pending:
            each = pending.pop()
            pending += self._below.get(each, {}).values()
            self._forget(each)
            self._below.pop(each, None)

    def _forget(self, own: int) -> None:
        """Take a page out, and its place is free; what goes on from it stays."""
        self.file.give_back(self._unlink(own).slot)

    def _unlink(self, own: int) -> _Record:
        """Take a page out of the books."""
        record = self._records.pop(own)
        below = self._below.get(record.parent)
        if below is not None and below.get(record.tokens) == own:
            del below[record.tokens]
            if not below:
                del self._below[record.parent]
        return record

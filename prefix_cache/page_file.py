"""A file of places for pages: which are free, what was written, whether it still stands there."""

import errno
import logging
import mmap
import os
import secrets
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np
import xxhash

_FILES: Final = "disk-"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class PageFile:
    """Slots of one page each. The file has no name, and the system frees it with the process,
    unless it is to be kept: then the next process may take it over.

    One thread calls it, but for `read`.
    """

    def __init__(self, num_slots: int, page_bytes: int, folder: Path | None, *, keep: bool) -> None:
        """In `folder`, by default the system's for temporary files; with `keep` it has a name
        there. Raises OSError."""
        self.num_slots = num_slots
        self._page_bytes = page_bytes
        self._path: Path | None = None
        if keep and folder is not None:
            self._path = folder / f"{_FILES}{secrets.token_hex(8)}"
        self._map(self._open(folder))
        self._free = list(range(num_slots))
        self._without_room: list[int] = []

    def _open(self, folder: Path | None) -> IO[bytes]:
        if self._path is None:
            return tempfile.TemporaryFile(dir=folder)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        return os.fdopen(descriptor, "r+b")

    def _map(self, file: IO[bytes]) -> None:
        num_bytes = self.num_slots * self._page_bytes
        with file:
            file.truncate(num_bytes)
            self.memory = mmap.mmap(file.fileno(), num_bytes)
            self._descriptor = os.dup(file.fileno())
            weakref.finalize(self.memory, os.close, self._descriptor)

    @property
    def name(self) -> str | None:
        """In its folder; None for a file that is not kept."""
        return None if self._path is None else self._path.name

    def take(self) -> int | None:
        """A free slot, the one given back last; None where there is none, or no room for it: that
        slot is set aside then."""
        if not self._free:
            return None
        slot = self._free.pop()
        if self._reserve(slot):
            return slot
        self._without_room.append(slot)
        return None

    def give_back(self, slot: int) -> None:
        """What stands there is of no use any more."""
        self._free.append(slot)

    def clear(self) -> None:
        """Every slot is free."""
        self._free = list(range(self.num_slots))
        self._without_room.clear()

    def unused(self) -> Iterator[int]:
        """The slots that nobody has taken."""
        yield from self._free
        yield from self._without_room

    def write(self, slot: int, data: bytes) -> int:
        """What `data`, a whole page, must add up to when it is read."""
        self.memory[slot * self._page_bytes : (slot + 1) * self._page_bytes] = data
        return xxhash.xxh3_64_intdigest(data)

    def read(self, slot: int, checksum: int) -> bytes | None:
        """What stands in a slot; None where that is not what was written. May be called on any
        thread, which waits for the disk alone."""
        place = slot * self._page_bytes
        buffer = np.empty(self._page_bytes, dtype=np.uint8)
        np.copyto(buffer, np.frombuffer(self.memory, np.uint8, self._page_bytes, place))
        data = buffer.tobytes()
        return data if xxhash.xxh3_64_intdigest(data) == checksum else None

    def flush(self) -> None:
        """Return when all that was written is in the file."""
        self.memory.flush()

    def take_over(self, name: str, num_slots: int) -> str:
        """Go on with a former file of the same folder, while nothing stands in this one; why not,
        or "". The file gets a new name: who knows the old one is not led to what comes into it."""
        if self._path is None or not name.startswith(_FILES) or "/" in name:
            return "its file is none of a disk tier"
        if num_slots != self.num_slots:
            return f"its file has room for {num_slots} pages, --cache-disk for another number"
        former = self._path.with_name(name)
        try:
            if former.stat().st_size != len(self.memory):
                return "its file is cut off"
            former.replace(self._path)
            self._map(self._path.open("r+b"))
        except OSError as error:
            return f"its file cannot be read: {error.strerror or error}"
        return ""

    def use(self, slots: Iterable[int]) -> None:
        """These are taken, and no others."""
        used = set(slots)
        self._free = [slot for slot in range(self.num_slots) if slot not in used]

    def remove_others(self) -> None:
        """Remove the files that former processes left in the folder of a kept one."""
        if self._path is None:
            return
        for left in self._path.parent.glob(f"{_FILES}*"):
            if left != self._path and not left.is_dir():
                left.unlink(missing_ok=True)

    def _reserve(self, slot: int) -> bool:
        """Whether the file system has room for a slot. The file is sparse: to write where there is
        none would end the process by SIGBUS."""
        try:
            os.posix_fallocate(self._descriptor, slot * self._page_bytes, self._page_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                return True  # it cannot say
            if not self._without_room:
                _log.warning("the second tier keeps only what fits: %s", error.strerror)
            return False
        return True

"""What one response told, in order, kept so that it can be told again, number for number.

The log holds events, not frames: an encoder with the same head makes the same frames of them. They
are packed as they come, which takes a tenth of the memory and costs the loop the same at each.
"""

from collections.abc import AsyncGenerator, Iterable
from typing import Final, get_args

import anyio
import anyio.lowlevel
import msgspec

from service.dialects.responses_entries import Cancelled, Entry
from service.events import Completed, Failed

CHUNK_ENTRIES: Final = 64
_ENDS: Final = (Completed, Failed, Cancelled)

_KINDS: Final[tuple[type[Entry], ...]] = get_args(Entry)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]]).decode


class EventLog:
    """One writer, any number of readers, at their own pace. Used from one event loop only."""

    __slots__ = ("_chunks", "_ended", "_grown", "_recent")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._recent: list[Entry] = []
        self._ended = False
        self._grown: anyio.Event | None = None

    def append(self, entry: Entry) -> int:
        """Add an entry; Completed, Failed and Cancelled are the last. The bytes newly kept."""
        self._recent.append(entry)
        self._ended = isinstance(entry, _ENDS)
        if self._grown is not None:
            self._grown.set()
            self._grown = None
        if not self._ended and len(self._recent) < CHUNK_ENTRIES:
            return 0
        self._chunks.append(_pack([(_NUMBERS[type(each)], each) for each in self._recent]))
        self._recent.clear()
        return len(self._chunks[-1])

    async def read(self) -> AsyncGenerator[list[Entry], None]:
        """All entries from the first, a few at a time, waiting for more until the last.

        Lets others run between two pieces.
        """
        position = 0
        while True:
            entries = self._after(position)
            if entries:
                position += len(entries)
                yield entries
                await anyio.lowlevel.checkpoint()
            elif self._ended:
                return
            else:
                self._grown = self._grown or anyio.Event()
                await self._grown.wait()

    async def read_told(self) -> AsyncGenerator[list[Entry], None]:
        """As `read`, without waiting for what is not there yet."""
        position = 0
        while entries := self._after(position):
            position += len(entries)
            yield entries
            await anyio.lowlevel.checkpoint()

    async def wait_end(self) -> None:
        """Return once the last entry is there."""
        while not self._ended:
            self._grown = self._grown or anyio.Event()
            await self._grown.wait()

    def _after(self, position: int) -> list[Entry]:
        number, offset = divmod(position, CHUNK_ENTRIES)
        if number < len(self._chunks):
            return list(_unpacked(self._chunks[number]))[offset:]
        return self._recent[offset:]


def _unpacked(chunk: bytes) -> Iterable[Entry]:
    for number, raw in _unpack(chunk):
        yield msgspec.msgpack.decode(raw, type=_KINDS[number])

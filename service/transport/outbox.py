"""`Outbox`: what waits to be written to one client, bounded in frames and bytes."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

Frame = TypeVar("Frame", bytes, str)


@dataclass(slots=True)
class OutboxTotals:
    """What waits in all outboxes of a server, for its metrics."""

    frames: int = 0
    num_bytes: int = 0


class OutboxClosed(Exception):
    """The client is gone: nothing put from now on would be written."""


class Outbox(Generic[Frame]):
    """Many writers, one reader. A full outbox makes its writers wait, so that a slow client
    stops reading its own generations, and those stop in the engine for want of credit.

    What the reader took counts against the bounds until it comes back for more. Used from one
    event loop only. All of it is counted in `totals`, until it is written or discarded.
    """

    def __init__(self, max_frames: int, max_bytes: int, totals: OutboxTotals | None = None) -> None:
        self._totals = totals or OutboxTotals()
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: deque[Frame] = deque()
        self._num_frames = 0
        self._num_bytes = 0
        self._taken_frames = 0
        self._taken_bytes = 0
        self._closed = False
        self._filled = anyio.Event()
        self._room = anyio.Event()

    async def put(self, frame: Frame) -> None:
        """Add a frame, waiting while there is no room. Raises OutboxClosed.

        A frame larger than the byte bound goes in alone. If cancelled, the frame was not added.
        """
        while not self._closed and not self._fits(frame):
            await self._room.wait()
        if self._closed:
            raise OutboxClosed
        self._frames.append(frame)
        self._num_frames += 1
        self._num_bytes += len(frame)
        self._totals.frames += 1
        self._totals.num_bytes += len(frame)
        self._filled.set()

    async def take(self) -> list[Frame]:
        """All that waits, at least one frame; empty when the outbox is closed and drained.

        Says that the frames taken before are written. If cancelled, nothing was taken.
        """
        self._release()
        while not self._frames and not self._closed:
            self._filled = anyio.Event()
            await self._filled.wait()
        frames = list(self._frames)
        self._frames.clear()
        self._taken_frames, self._taken_bytes = self._num_frames, self._num_bytes
        return frames

    def close(self) -> None:
        """No more frames; those inside can still be taken. Waiting writers get OutboxClosed."""
        self._closed = True
        self._filled.set()
        self._room.set()

    def discard(self) -> None:
        """Close, and drop what is inside: nobody will write it."""
        self.close()
        self._frames.clear()
        self._taken_frames, self._taken_bytes = self._num_frames, self._num_bytes
        self._release()

    def _fits(self, frame: Frame) -> bool:
        if not self._num_frames:
            return True
        return (
            self._num_frames < self._max_frames and self._num_bytes + len(frame) <= self._max_bytes
        )

    def _release(self) -> None:
        if self._taken_frames:
            self._num_frames -= self._taken_frames
            self._num_bytes -= self._taken_bytes
            self._totals.frames -= self._taken_frames
            self._totals.num_bytes -= self._taken_bytes
            self._taken_frames = self._taken_bytes = 0
            self._room.set()
            self._room = anyio.Event()

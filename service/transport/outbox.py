"""`Outbox`: what waits to be written to one client, bounded in frames and bytes."""

from collections import deque
from typing import Generic, TypeVar

import anyio

Frame = TypeVar("Frame", bytes, str)


class OutboxClosed(Exception):
    """The client is gone: nothing put from now on would be written."""


class Outbox(Generic[Frame]):
    """Many writers, one reader. A full outbox makes its writers wait, so that a slow client
    stops reading its own generations, and those stop in the engine for want of credit.

    What the reader took counts against the bounds until it comes back for more. Used from one
    event loop only.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
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
            self._taken_frames = self._taken_bytes = 0
            self._room.set()
            self._room = anyio.Event()

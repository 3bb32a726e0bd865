"""Who listens to the cache's events on the edge's side of the border."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from engine.types import CacheEventInfo

_MOST_PENDING: Final = 4096
_RESYNC: Final = CacheEventInfo("resync", "", "", ())


class CacheWatchers:
    """Hands each event to all that listen; the engine tells them only while somebody does.

    A listener that does not keep up loses what is pending, and is told so by "resync".
    """

    def __init__(self, tell_engine: Callable[[bool], None]) -> None:
        self._tell_engine = tell_engine
        self._queues: set[asyncio.Queue[CacheEventInfo | None]] = set()

    async def listen(self) -> AsyncGenerator[CacheEventInfo, None]:
        """Events from the first `anext` on, which begins with a "resync", until the engine ends.
        Close it (`aclosing`)."""
        queue: asyncio.Queue[CacheEventInfo | None] = asyncio.Queue(_MOST_PENDING)
        if not self._queues:
            self._tell_engine(True)
        self._queues.add(queue)
        try:
            yield _RESYNC
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)
            if not self._queues:
                self._tell_engine(False)

    def deliver(self, events: tuple[CacheEventInfo, ...]) -> None:
        """Events of one message."""
        for queue in self._queues:
            for event in events:
                self._put(queue, event)

    def end(self) -> None:
        """The engine has ended: so do all that listen to it."""
        for queue in self._queues:
            self._put(queue, None)

    def _put(
        self, queue: "asyncio.Queue[CacheEventInfo | None]", event: CacheEventInfo | None
    ) -> None:
        if queue.full():
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(_RESYNC)
        queue.put_nowait(event)

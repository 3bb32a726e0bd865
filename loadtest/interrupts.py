"""Ctrl-C ends the load, never the report."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Inside `with`, SIGINT and SIGTERM set the stop event of `run`, also one that came before it.
    The third one is an ordinary KeyboardInterrupt, for a program that does not end."""

    def __init__(self) -> None:
        self._count = 0
        self._stop: Callable[[], object] | None = None
        self._before: list[Any] = []

    def __enter__(self) -> "Interrupts":
        self._before = [signal.signal(number, self._arrived) for number in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    async def run(self, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        """Await `work(stop)`; a signal that came before counts as well."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        try:
            if self._count:
                stop.set()
            await work(stop)
        finally:
            self._stop = None

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= 3:
            raise KeyboardInterrupt
        if self._stop is not None:
            self._stop()

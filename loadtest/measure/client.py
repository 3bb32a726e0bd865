"""Watches the client itself: an overloaded client measures itself, and must say so."""

import asyncio
import time

import msgspec

from loadtest.measure.histogram import Histogram

TICK_S = 0.02
BUSY_SHARE = 0.85
LATE_MS = 25.0


class ClientLoad(msgspec.Struct, frozen=True):
    """`cpu_share` of one core this process used; `lag_*_ms` how late its event loop was."""

    cpu_share: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float

    @property
    def overloaded(self) -> bool:
        """The figures are partly the client's own: use a faster machine or less load."""
        return self.cpu_share > BUSY_SHARE or self.lag_p50_ms > LATE_MS


class ClientWatch:
    """Measures between `__aenter__` and `__aexit__`; `load` is then set."""

    def __init__(self) -> None:
        self._lag = Histogram()
        self.load = ClientLoad(0.0, 0.0, 0.0, 0.0)

    async def __aenter__(self) -> "ClientWatch":
        self._cpu_s = time.process_time()
        self._start_s = time.perf_counter()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        wall_s = max(time.perf_counter() - self._start_s, 1e-9)
        self.load = ClientLoad(
            cpu_share=(time.process_time() - self._cpu_s) / wall_s,
            lag_p50_ms=self._lag.at(50) if self._lag.count else 0.0,
            lag_p99_ms=self._lag.at(99) if self._lag.count else 0.0,
            lag_max_ms=self._lag.at(100) if self._lag.count else 0.0,
        )

    async def _tick(self) -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag.record(time.perf_counter() - due_s)

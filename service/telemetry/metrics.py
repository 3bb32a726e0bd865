"""`Metrics`: everything that is counted, collected when somebody asks."""

from collections.abc import Sequence
from typing import Protocol

from engine.api import Engine, EngineError
from engine.stats import EngineStats
from service.telemetry import metric_list as m
from service.telemetry.engine_metrics import engine_samples
from service.telemetry.samples import Counts, Sample
from service.telemetry.tracing import RequestTracer


class Unsent(Protocol):
    """Connections, as far as they are counted."""

    @property
    def num_unsent_bytes(self) -> int: ...


class Metrics:
    """The counts of the edge and of the engine, as one list of samples."""

    def __init__(
        self,
        counts: Counts,
        connections: Unsent,
        engine: Engine,
        model: str,
        tracers: Sequence[RequestTracer] = (),
    ) -> None:
        self._tracers = tracers
        self._counts = counts
        self._connections = connections
        self._engine = engine
        self._model = model
        self._last: EngineStats | None = None

    async def collect(self) -> list[Sample]:
        """All samples as of now. An engine that is gone tells its last counts, and that it is
        gone; before its first word, nothing of it is known."""
        up = self._engine.alive
        try:
            self._last = await self._engine.stats()
        except EngineError:
            up = False
        samples = list(self._counts.samples())
        samples.append(Sample(m.UNSENT_BYTES, (), self._connections.num_unsent_bytes))
        dropped = sum(tracer.num_dropped for tracer in self._tracers)
        samples.append(Sample(m.DROPPED, (), dropped))
        if self._last is not None:
            samples += engine_samples(self._last, self._engine.info, self._model, up)
        return samples

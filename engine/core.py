"""`Core`: what the loop drives, one step at a time, on the engine's own thread."""

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.stats import EngineLoad, EngineStats, PoolStats
from engine.types import (
    CacheAnswer,
    CacheCall,
    CacheEventInfo,
    EngineEvent,
    EngineInfo,
    EngineRequest,
)
from engine.views import EngineView, NodeView
from kernels.contract import do_nothing


class MeanwhileFailed(Exception):
    """What was to be done while a step computes has failed; it is no fault of the step."""


class Core(Protocol):
    """A synchronous engine. Every request added ends with exactly one Finished from `step`."""

    @property
    def info(self) -> EngineInfo: ...

    def add(self, request: EngineRequest) -> None:
        """Take a request into the waiting queue. What is wrong with it is told by its Finished."""

    def abort(self, request_id: str) -> None:
        """End a request at the next step; unknown and ended ids are ignored."""

    def grant(self, request_id: str, credits: int) -> None:
        """Add credits to a request; unknown and ended ids are ignored."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now; False while all are paused for want of credit."""

    @property
    def wake_ns(self) -> int:
        """Monotonic time at which `step` must be called even without input (deadline, scripted
        delay); 0 for never."""

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> Iterable[EngineEvent]:
        """Plan and run one step; the events of it, in order, which may be made only when they are
        read. A fault inside fails the requests of the step with Finished(ERROR), never the loop.
        `meanwhile` is called once, while it computes if it does; raises MeanwhileFailed if that
        raises. The events of a step are best read in that of the next, if there is one to be
        made at once: reading them is work."""

    @property
    def load(self) -> EngineLoad:
        """What a request that comes now has to reckon with."""

    def stats(self) -> EngineStats: ...

    def flush(self) -> int:
        """Drop all cached pages that nothing references; how many."""

    def audit(self) -> PoolStats:
        """Recount pages from tree and tables. Raises EngineError naming every difference."""

    def ask_cache(self, call: CacheCall) -> CacheAnswer:
        """Explain a prompt (a CacheReport), or do something about leases (those it was about)."""

    def watch_cache(self, on: bool) -> None:
        """Collect events of the cache from now on, or no more."""

    def take_cache_events(self) -> tuple[CacheEventInfo, ...]:
        """The events since the last call, in order."""

    def view(self, *, tree: bool) -> EngineView:
        """See `engine.api.Engine.view`."""

    def read_node(self, page: int) -> NodeView | None:
        """See `engine.api.Engine.read_node`."""

    def save(self) -> None:
        """Keep what is cached for the next engine, where that is configured. Nothing runs."""

    def close(self) -> None: ...

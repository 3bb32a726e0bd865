"""`Engine`: all that the service may call; process, in-thread and scripted engines behave alike.

Every method is called from one event loop. Cancellation of a call never leaves a request running:
closing the iterator of `generate` (or cancelling the task that reads it) aborts the request.
"""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from engine.stats import EngineStats, PoolStats
from engine.types import (
    CacheEventInfo,
    CacheReport,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    ExplainPrompt,
    ExtendLease,
    LeaseInfo,
    ListLeases,
    Prompt,
    ReleaseLease,
)
from engine.views import EngineView, NodeView


class EngineError(Exception):
    """The engine cannot do what was asked. `retryable`: the same request may succeed later."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class EngineOverloaded(EngineError):
    """The request would wait for too long; after `retry_after_s` it would not, if nobody else
    came meanwhile."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retryable=True)
        self.retry_after_s = retry_after_s


class EngineDead(EngineError):
    """The engine process has ended; running requests got a `Finished` with ERROR."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class EngineSilent(EngineError):
    """The engine has not answered in time: a long step, or it hangs."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class RequestRefused(EngineError):
    """The request is outside the engine's limits; `field` names what."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is. `reason` says why it does not run; empty while it does.

    `silent_s` is how long ago it was last heard of: a busy engine speaks after each step, an idle
    one when it is asked, which its supervisor does about once a second.
    """

    state: Literal["running", "restarting", "draining", "ended"]
    silent_s: float
    num_restarts: int = 0
    reason: str = ""


class EventStream(Protocol):
    """The events of one request; `aclose` aborts it if it has not ended."""

    def __aiter__(self) -> "EventStream": ...

    async def __anext__(self) -> EngineEvent: ...

    def ready(self) -> list[EngineEvent]:
        """What has arrived beyond what was read, read at once: more than nothing where the engine
        is ahead of its reader."""

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """An engine that has started."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """Whether requests are taken now: False while it is down, and once it drains."""

    @property
    def health(self) -> EngineHealth: ...

    def generate(self, request: EngineRequest) -> EventStream:
        """Events of one request: Started at admission (absent if it ended before), PromptLogprobs
        where they were asked for, then TokenDelta, then exactly one Finished. Reading an event
        returns the credit of its tokens.

        The request is sent when `generate` is called, so requests arrive in calling order.
        Raises RequestRefused, EngineOverloaded or EngineDead at the call, not at the first read.
        Closing the iterator aborts the request by the engine's next step.
        """

    def check_load(self, prompt: Prompt) -> None:
        """Raises EngineOverloaded or EngineDead where `generate` would for a request with such a
        prompt: for those who have not tokenised it yet."""

    def abort(self, request_id: str) -> None:
        """End a request by the next step; its iterator still yields its Finished (ABORT)."""

    async def stats(self) -> EngineStats:
        """Raises EngineSilent or EngineDead, as `flush` and `audit` do."""

    async def flush(self) -> int:
        """Drop all cached pages that nothing references; how many."""

    async def audit(self) -> PoolStats:
        """Recount pages from tree and tables. Raises EngineError naming every difference."""

    async def explain(self, prompt: ExplainPrompt) -> CacheReport:
        """What the cache would have of a prompt now. Nothing is computed, and no use counted."""

    async def leases(self, call: ListLeases | ExtendLease | ReleaseLease) -> tuple[LeaseInfo, ...]:
        """Do it; the leases it was about, as they are then (a released one as it was)."""

    def cache_events(self) -> AsyncGenerator[CacheEventInfo, None]:
        """What becomes cached and ceases to be, for all tenants, from the first `anext` on, which
        gives a "resync"; it ends with the engine. Close it."""

    async def view(self, *, tree: bool) -> EngineView:
        """What runs and waits now, and with `tree` the radix tree; bounded in size and time."""

    async def read_node(self, page: int) -> NodeView | None:
        """The tree's node that lists a page; None where none does."""

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish within `grace_s`, abort the rest. When it
        returns the engine has ended, by force if it had to be, and every request has its Finished.
        """

    async def close(self) -> None:
        """Abort what runs, end the engine process and wait for it."""

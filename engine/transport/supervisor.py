"""`EngineSupervisor`: an engine that is watched, and started again when it dies or hangs."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from engine.api import EngineError, EngineHealth
from engine.stats import EngineStats, PoolStats
from engine.transport.client import SHUTTING_DOWN, EngineClient
from engine.transport.process import LOAD_LIMIT_S, SpareProcess
from engine.transport.stream import EventStream
from engine.types import (
    CacheEventInfo,
    CacheReport,
    EngineConfig,
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

PULSE_S = 0.5
"""How often a silent engine is asked for a sign of life."""
QUICK_DEATH_S = 1.0
"""An engine that dies sooner after its start makes the next start wait, longer each time."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """When an engine counts as hung, and how often one is started again.

    `step_limit_s` is the longest silence: above the longest honest step. Loading the model may
    take the longer of it and `load_limit_s`. The engine that dies once more than `max_restarts`
    times within `window_s` stays dead.
    """

    step_limit_s: float = 120.0
    load_limit_s: float = LOAD_LIMIT_S
    max_restarts: int = 5
    window_s: float = 60.0


class EngineSupervisor:
    """Implements `Engine` over one engine after another. `open` has to succeed first.

    An engine's death ends its requests, which are told, and nothing else: the next one has the
    same memory and starts with an empty cache. It is waiting already, as a spare process.
    """

    def __init__(self, config: EngineConfig, rules: Supervision, module: str = "engine") -> None:
        """`module` is as for `SpareProcess`."""
        self._config = config
        self._module = module
        self._rules = rules
        self._spare: SpareProcess | None = None
        self._client: EngineClient
        self._info: EngineInfo
        self._task: asyncio.Task[None]
        self._deaths: deque[float] = deque()
        self._num_restarts = 0
        self._num_quick_deaths = 0
        self._ready_s = 0.0
        self._closing = False
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Start the first engine and watch it. Raises EngineError with nothing left running."""
        self._client = await self._start()
        self._info = self._client.info
        self._config = _same_again(self._config, self._info)
        self._ready_s = time.monotonic()
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    @property
    def info(self) -> EngineInfo:
        """The same for every engine."""
        return self._info

    @property
    def alive(self) -> bool:
        return self._client.alive and not self._closing

    @property
    def health(self) -> EngineHealth:
        health = self._client.health
        state, reason = health.state, health.reason
        if self._given_up.done():
            state, reason = "ended", self._given_up.result()
        elif self._closing:
            if state == "running":  # the engine is told in a moment
                state, reason = "draining", SHUTTING_DOWN
        elif state != "running":
            state = "restarting"
        return msgspec.structs.replace(
            health, state=state, reason=reason, num_restarts=self._num_restarts
        )

    @property
    def pid(self) -> int | None:
        """The present engine's process."""
        return self._client.pid

    async def wait_given_up(self) -> str:
        """Return, with the reason, when no engine will be started again."""
        return await asyncio.shield(self._given_up)

    def generate(self, request: EngineRequest) -> EventStream:
        return self._client.generate(request)

    def check_load(self, prompt: Prompt) -> None:
        self._client.check_load(prompt)

    def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def flush(self) -> int:
        return await self._client.flush()

    async def audit(self) -> PoolStats:
        return await self._client.audit()

    async def explain(self, prompt: ExplainPrompt) -> CacheReport:
        return await self._client.explain(prompt)

    async def leases(self, call: ListLeases | ExtendLease | ReleaseLease) -> tuple[LeaseInfo, ...]:
        return await self._client.leases(call)

    def cache_events(self) -> AsyncGenerator[CacheEventInfo, None]:
        return self._client.cache_events()

    async def view(self, *, tree: bool) -> EngineView:
        return await self._client.view(tree=tree)

    async def read_node(self, page: int) -> NodeView | None:
        return await self._client.read_node(page)

    async def drain(self, grace_s: float) -> None:
        await self._stop()
        await self._client.drain(grace_s)

    async def close(self) -> None:
        await self._stop()
        await self._client.close()

    async def _stop(self) -> None:
        """Let nothing be started again; an engine that is starting is ended."""
        self._closing = True
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    async def _start(self) -> EngineClient:
        """An engine that is ready, of the spare process if that is still good. Raises
        EngineError."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.alive:
            spare.end()
            spare = None
        spare = spare or SpareProcess(self._config, self._module)
        return await spare.begin(
            self._last_words, max(self._rules.step_limit_s, self._rules.load_limit_s)
        )

    def _keep_spare(self) -> None:
        """Without one the next engine only comes later."""
        try:
            self._spare = SpareProcess(self._config, self._module)
        except EngineError as error:
            _log.warning("no spare engine: %s", error)

    async def _supervise(self) -> None:
        try:
            self._keep_spare()
            while not self._given_up.done():
                await self._watch(self._client)
                await self._start_again()
        except Exception as error:
            _log.exception("the engine's supervisor failed")
            self._give_up(f"the engine's supervisor failed: {error}")

    async def _watch(self, client: EngineClient) -> None:
        """Return when the engine has ended; kill it when it is silent for too long.

        Silence is counted in our own ticks: what stops us as well is no fault of the engine.
        """
        silent_s, heard_ns, asked = 0.0, 0, False
        while not await client.wait_ended(PULSE_S):
            if client.heard_ns != heard_ns:
                silent_s, heard_ns, asked = 0.0, client.heard_ns, False
            elif asked:
                silent_s += PULSE_S
            else:  # only now: one that talks anyway need not say more
                client.ask_for_sign()
                asked = True
            if silent_s >= self._rules.step_limit_s:
                limit = f"{self._rules.step_limit_s:g} s"
                client.kill(f"the engine gave no sign of life for {limit} and was killed")

    async def _start_again(self) -> None:
        """Replace the engine that has ended, unless there were too many."""
        died_s = time.monotonic()
        if died_s - self._ready_s >= QUICK_DEATH_S:
            self._num_quick_deaths = 0
        while not self._given_up.done():
            await asyncio.sleep(self._pause_s())
            self._num_quick_deaths += 1
            try:
                client = await self._start()
            except EngineError as error:
                _log.error("%s", self._last_words(f"the engine cannot be started: {error}"))
                continue
            if client.info.model_digest != self._info.model_digest:
                await client.close()
                self._give_up("the model's files have changed while the server ran")
                return
            self._client = client
            self._num_restarts += 1
            self._ready_s = time.monotonic()
            _log.warning("the engine runs again, %.1f s after its end", self._ready_s - died_s)
            self._keep_spare()
            return

    def _pause_s(self) -> float:
        if not self._num_quick_deaths:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._num_quick_deaths - 1))

    def _last_words(self, reason: str) -> str:
        """Count a death, and say what follows from it."""
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - self._rules.window_s:
            self._deaths.popleft()
        if len(self._deaths) <= self._rules.max_restarts:
            return f"{reason}; it is being started again"
        times = "once" if len(self._deaths) == 1 else f"{len(self._deaths)} times"
        within = f"{times} within {self._rules.window_s:g} s"
        return self._give_up(f"{reason}; it died {within} and is not started again")

    def _give_up(self, reason: str) -> str:
        if not self._given_up.done():
            self._given_up.set_result(reason)
        return reason


def _same_again(config: EngineConfig, info: EngineInfo) -> EngineConfig:
    """What the first engine chose from the machine's state and measured is given to the next. It
    does not warm up: clients wait, and there is no stream yet that a first step could hold up."""
    return msgspec.structs.replace(
        config,
        kv_memory_bytes=info.num_pages * info.page_bytes,
        threads=info.threads,
        peak_bytes_per_s=info.peak_bytes_per_s,
        peak_flops_per_s=info.peak_flops_per_s,
        warm_up=False,
    )


async def start_supervised_engine(
    config: EngineConfig, rules: Supervision, *, module: str = "engine"
) -> EngineSupervisor:
    """A supervised engine process for `config`. Raises EngineError, with nothing left running."""
    supervisor = EngineSupervisor(config, rules, module)
    await supervisor.open()
    return supervisor

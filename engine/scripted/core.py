"""`ScriptedCore`: the test engine. It says given tokens in given groups with given delays, and
keeps every promise of a real core: admission, credits, stops, limits, deadlines, aborts."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from engine.scripted.run import Run
from engine.scripted.script import ScriptFile, ScriptFor, ScriptStep, byte_token
from engine.stats import Distribution, EngineLoad, EngineStats, PoolStats
from engine.types import (
    CacheAnswer,
    CacheCall,
    CacheEventInfo,
    CacheReport,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    ExplainPrompt,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenDelta,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from engine.views import MAX_LANES, EngineView, NodeView
from kernels.contract import do_nothing

NO_SAMPLES: Final = Distribution((), (0,), 0)
"""It computes nothing, so there is nothing to measure."""


class ScriptedCore:
    """A `Core` that plays `script_for(request)`; requests speak side by side, none waits.

    `token_bytes` is the vocabulary of the steps that give no text of their own; `eos_token_ids`
    end a request like a model's end of text. A token that ends a request is in the last delta's
    `token_ids`, its bytes are not in `text`. `step_s` is the time from one step to the next: what
    is due meanwhile is said together, as a model's batch is. `clock_ns` gives all times, above 0.
    """

    def __init__(
        self,
        script_for: ScriptFor,
        *,
        info: EngineInfo | None = None,
        token_bytes: Callable[[int], bytes] = byte_token,
        eos_token_ids: frozenset[int] = frozenset(),
        step_s: float = 0.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._script_for = script_for
        self._info = info or ScriptFile().info(page_size=16)
        self._token_bytes = token_bytes
        self._eos_token_ids = eos_token_ids
        self._step_ns = int(step_s * 1e9)
        self._clock_ns = clock_ns
        self._next_step_ns = 0
        self._runs: dict[str, Run] = {}
        self._events: list[EngineEvent] = []
        self._num_steps = 0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, request: EngineRequest) -> None:
        script = self._script_for(request)
        script.check()
        self._runs[request.id] = Run(request, script, self._clock_ns())
        self._num_requests += 1
        self._num_prompt_tokens += self._runs[request.id].num_prompt_tokens

    def abort(self, request_id: str) -> None:
        if request_id in self._runs:
            self._runs[request_id].aborted = True

    def grant(self, request_id: str, credits: int) -> None:
        if request_id in self._runs:
            self._runs[request_id].credits += credits

    @property
    def has_work(self) -> bool:
        return 0 < self.wake_ns <= self._clock_ns()

    @property
    def wake_ns(self) -> int:
        times = (run.speaks_ns for run in self._runs.values())
        due_ns = min((time_ns for time_ns in times if time_ns), default=0)
        return due_ns and max(due_ns, self._next_step_ns)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[EngineEvent]:
        meanwhile()
        self._num_steps += 1
        now_ns = self._clock_ns()
        self._next_step_ns += self._step_ns
        if self._next_step_ns <= now_ns:
            self._next_step_ns = now_ns + self._step_ns
        for run in list(self._runs.values()):
            self._advance(run, now_ns)
        events, self._events = self._events, []
        return events

    @property
    def load(self) -> EngineLoad:
        """Nothing waits here, so nothing is measured."""
        return EngineLoad()

    def stats(self) -> EngineStats:
        waiting = sum(not run.started_ns for run in self._runs.values())
        return EngineStats(
            pool=self.audit(),
            running=len(self._runs) - waiting,
            waiting=waiting,
            paused=sum(run.started_ns > 0 and run.credits <= 0 for run in self._runs.values()),
            step_ns=NO_SAMPLES,
            step_tokens=NO_SAMPLES,
            chunk_tokens=NO_SAMPLES,
            evicted_pages={},
            work=(),
            recent_steps=(),
            num_queried_tokens=self._num_queried_tokens,
            num_steps=self._num_steps,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_computed_tokens=self._num_queried_tokens
            - self._num_cached_tokens
            + self._num_output_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=0,
        )

    def flush(self) -> int:
        return 0

    def audit(self) -> PoolStats:
        """Running requests reference the pages their tokens would take; nothing is ever cached."""
        total, size = self._info.num_pages, self._info.page_size
        referenced = sum(
            -(-(run.num_prompt_tokens + run.num_output_tokens) // size)
            for run in self._runs.values()
            if run.started_ns
        )
        referenced = min(referenced, total)
        return PoolStats(
            total=total, free=total - referenced, cached=0, referenced=referenced, pinned=0
        )

    def ask_cache(self, call: CacheCall) -> CacheAnswer:
        """Every prompt is cold, and nothing is leased."""
        return CacheReport(0, reason="cold") if isinstance(call, ExplainPrompt) else ()

    def watch_cache(self, on: bool) -> None:
        """Nothing is ever cached."""

    def take_cache_events(self) -> tuple[CacheEventInfo, ...]:
        return ()

    def view(self, *, tree: bool) -> EngineView:
        """No tree: nothing is ever cached."""
        now_ns = self._clock_ns()
        lanes = tuple(run.lane(now_ns) for run in list(self._runs.values())[:MAX_LANES])
        return EngineView(time_ns=now_ns, stats=self.stats(), lanes=lanes)

    def read_node(self, page: int) -> NodeView | None:
        """There is none."""
        return None

    def save(self) -> None:
        """Nothing is ever cached."""

    def close(self) -> None:
        self._runs.clear()

    def _advance(self, run: Run, now_ns: int) -> None:
        """What happens to one request in one step: at most one delta."""
        deadline_ns = run.request.deadline_ns
        if run.aborted:
            self._finish(run, now_ns, FinishReason.ABORT)
            return
        if deadline_ns and deadline_ns <= now_ns:
            self._finish(run, now_ns, FinishReason.DEADLINE)
            return
        if not run.started_ns:
            self._start(run, now_ns)
            if not run.request.sampling.max_tokens:
                self._finish(run, now_ns, FinishReason.LENGTH)
                return
        if not 0 < run.speaks_ns <= now_ns:
            return
        if run.at_end:
            self._finish_script(run, now_ns)
        else:
            self._say(run, run.script.steps[run.step], now_ns)

    def _start(self, run: Run, now_ns: int) -> None:
        run.started_ns = now_ns
        self._num_queried_tokens += run.num_prompt_tokens
        self._num_cached_tokens += run.num_cached_tokens
        self._events.append(
            Started(run.request.id, run.num_prompt_tokens, run.num_cached_tokens, now_ns)
        )
        if run.request.sampling.prompt_logprobs is not None and run.num_prompt_tokens > 1:
            self._events.append(_made_up_scores(run.request, now_ns))
        run.wait_for_step(now_ns)

    def _say(self, run: Run, step: ScriptStep, now_ns: int) -> None:
        """Say a step, or as much of it as credit and max_tokens allow."""
        if step.crash:
            raise RuntimeError(step.crash)
        if step.error:
            self._finish(run, now_ns, FinishReason.ERROR, message=step.error)
            return
        sampling = run.request.sampling
        room = min(run.credits, sampling.max_tokens - run.num_output_tokens)
        text, token_ids, stop, stop_token_id = self._match(run, step, room)
        if token_ids or text:
            self._emit(run, step, token_ids, text, now_ns)
        if stop or stop_token_id >= 0:
            self._finish(run, now_ns, FinishReason.STOP, stop=stop, stop_token_id=stop_token_id)
        elif run.num_output_tokens >= sampling.max_tokens:
            self._finish(run, now_ns, FinishReason.LENGTH)
        elif run.offset >= len(step.token_ids):
            run.step += 1
            run.offset = 0
            run.wait_for_step(now_ns)
            if run.at_end:
                self._finish_script(run, now_ns)

    def _match(
        self, run: Run, step: ScriptStep, room: int
    ) -> tuple[bytes, tuple[int, ...], bytes, int]:
        """Text to release, tokens said (up to `room`, or to the one that stops), the stop string
        found, and the token that stops or -1."""
        said = step.token_ids[run.offset : run.offset + room]
        if step.text is not None:
            text, stop = run.matcher.feed(b"" if run.offset else step.text)
            return text + self._shown(run, stop), said, stop or b"", -1
        sampling = run.request.sampling
        ends = frozenset() if sampling.ignore_eos else self._eos_token_ids
        text = b""
        for num_said, token_id in enumerate(said, 1):
            if token_id in ends or token_id in sampling.stop_token_ids:
                return text, said[:num_said], b"", token_id
            released, stop = run.matcher.feed(self._token_bytes(token_id))
            text += released
            if stop is not None:
                return text + self._shown(run, stop), said[:num_said], stop, -1
        return text, said, b"", -1

    def _shown(self, run: Run, stop: bytes | None) -> bytes:
        return stop if stop and run.request.sampling.include_stop else b""

    def _emit(
        self, run: Run, step: ScriptStep, token_ids: tuple[int, ...], text: bytes, now_ns: int
    ) -> None:
        num_logprobs = run.request.sampling.logprobs
        logprobs: tuple[TokenLogprobs, ...] = ()
        if num_logprobs is not None:
            given = step.logprobs[run.offset : run.offset + len(token_ids)]
            made_up = (TokenLogprobs(0.0, (token_id,), (0.0,)) for token_id in token_ids)
            logprobs = tuple(
                TokenLogprobs(
                    one.logprob, one.top_ids[:num_logprobs], one.top_logprobs[:num_logprobs]
                )
                for one in given or made_up
            )
        packed = pack_tokens(list(token_ids))
        self._events.append(TokenDelta(run.request.id, packed, text, now_ns, logprobs))
        run.first_token_ns = run.first_token_ns or now_ns
        run.credits -= len(token_ids)
        run.offset += len(token_ids)
        run.num_output_tokens += len(token_ids)
        self._num_output_tokens += len(token_ids)

    def _finish_script(self, run: Run, now_ns: int) -> None:
        if run.script.finish is not None:
            self._finish(run, now_ns, run.script.finish)

    def _finish(
        self,
        run: Run,
        now_ns: int,
        reason: FinishReason,
        *,
        stop: bytes = b"",
        stop_token_id: int = -1,
        message: str = "",
    ) -> None:
        held = run.matcher.flush()
        last = self._events[-1] if self._events else None
        if held and isinstance(last, TokenDelta) and last.request_id == run.request.id:
            self._events[-1] = msgspec.structs.replace(last, text=last.text + held)
        elif held:
            self._events.append(TokenDelta(run.request.id, b"", held, now_ns))
        self._events.append(
            Finished(
                run.request.id,
                reason,
                run.num_prompt_tokens,
                run.num_cached_tokens if run.started_ns else 0,
                run.num_output_tokens,
                now_ns,
                stop=stop,
                stop_token_id=stop_token_id,
                message=message,
                phases=run.phases(now_ns),
            )
        )
        del self._runs[run.request.id]


def _made_up_scores(request: EngineRequest, now_ns: int) -> PromptLogprobs:
    """Every token of the prompt but the first was certain."""
    num_top = request.sampling.prompt_logprobs or 0
    scores = [
        TokenLogprobs(0.0, (token_id,)[:num_top], (0.0,)[:num_top])
        for token_id in unpack_tokens(request.token_ids)[1:].tolist()
    ]
    return PromptLogprobs(request.id, 1, tuple(scores), now_ns)

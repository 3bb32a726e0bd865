"""`EngineCore`: scheduler, runner and sampler as one synchronous engine."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from engine.api import EngineError, RequestRefused
from engine.core import MeanwhileFailed
from engine.execution.forward_batch import SequenceChunk
from engine.execution.grammar import GrammarCompiler
from engine.execution.penalties import LogitRules, changes_logits
from engine.execution.runner import ModelRunner
from engine.execution.saved_cache import SavedCache
from engine.limits import check_request
from engine.scheduling.cache_desk import CacheDesk
from engine.scheduling.gather_stats import gather_stats, pool_stats
from engine.scheduling.idle_audit import IdleAudit
from engine.scheduling.lookout import Lookout
from engine.scheduling.output import Outcome, OutputRules, Said
from engine.scheduling.page_writers import PageWriters
from engine.scheduling.request import Request
from engine.scheduling.restoring import Restoring
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_computer import Computed, StepComputer
from engine.scheduling.step_meter import StepMeter
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.scheduling.totals import Totals
from engine.scheduling.untold import Untold
from engine.stats import EngineLoad, EngineStats, PoolStats
from engine.types import (
    CacheAnswer,
    CacheCall,
    CacheEventInfo,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    FinishReason,
    Started,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)
from engine.views import EngineView, NodeView
from kernels.contract import Int32Array, do_nothing
from prefix_cache.cache import AuditError, PrefixCache

_WARM_UP_NS = 150_000_000

_log = logging.getLogger(__name__)


class EngineCore:
    """Implements `engine.core.Core`. A request is live from `add` to its Finished.

    A fault while a step is planned ends every live request, one while it runs ends those of the
    step; the pages they wrote in it are released and never published.
    """

    def __init__(
        self,
        info: EngineInfo,
        kv_dtype: str,
        runner: ModelRunner[Any, Any],
        cache: PrefixCache,
        scheduler: Scheduler,
        rules: OutputRules,
        *,
        max_live: int,
        meter: StepMeter | None = None,
        grammars: GrammarCompiler | None = None,
        clock_ns: Callable[[], int] = monotonic_ns,
        saved: SavedCache | None = None,
        idle_audit_s: float = 0.0,
        restoring: Restoring | None = None,
    ) -> None:
        """`max_live` bounds the requests that wait or run; more are refused. Without `grammars`,
        requests that have one are refused. `clock_ns` gives all times."""
        self._clock_ns = clock_ns
        self._grammars = grammars
        self._saved = saved
        self._restoring = restoring
        self._idle_audit = IdleAudit(cache, int(idle_audit_s * 1e9))
        self._info = info
        self._desk = CacheDesk(cache, info, kv_dtype)
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._rules = rules
        self._max_live = max_live
        self._live: dict[str, Request] = {}
        self._aborted: dict[str, Request] = {}
        self._refused: list[Finished] = []
        self._totals = Totals()
        self._meter = meter or StepMeter()
        self._unlearned: tuple[StepPlan, float] | None = None
        self._computer = StepComputer(runner, info.vocab_size, clock_ns)
        self._following: StepPlan | None = None
        self._untold: Untold | None = None
        self._writers = PageWriters(info.num_pages, info.page_size)
        self._lookout = Lookout(cache, scheduler, info.page_size, clock_ns)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, request: EngineRequest) -> None:
        """Raises EngineError for the id of a live request; all else is told by its Finished."""
        if request.id in self._live:
            raise EngineError(f"request {request.id!r} is running already")
        num_prompt_tokens = len(request.token_ids) // 4
        self._totals.requests += 1
        self._totals.prompt_tokens += num_prompt_tokens
        try:
            check_request(request, self._info)
            if request.grammar and self._grammars is None:
                raise RequestRefused("this engine has no grammars", "grammar")
            if len(self._live) >= self._max_live:
                raise RequestRefused(f"{self._max_live} requests wait or run already", "id")
        except RequestRefused as refusal:
            self._refused.append(
                Finished(
                    request.id,
                    FinishReason.ERROR,
                    num_prompt_tokens,
                    num_cached_tokens=0,
                    num_output_tokens=0,
                    time_ns=self._clock_ns(),
                    message=f"{refusal.field}: {refusal}",
                )
            )
            return
        prompt = unpack_tokens(request.token_ids)
        live = Request(
            request,
            prompt,
            self._desk.namespace(request.tenant, request.salt),
            arrival=self._totals.requests,
            now_ns=self._clock_ns(),
            max_context=self._info.max_context,
            logit_rules=self._logit_rules(request, prompt),
            end_token_ids=self._rules.end_token_ids(request.sampling),
        )
        self._live[request.id] = live
        self._scheduler.add(live)

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._aborted[request_id] = self._live[request_id]

    def grant(self, request_id: str, credits: int) -> None:
        if request_id in self._live:
            self._live[request_id].credits += credits

    @property
    def has_work(self) -> bool:
        if self._following is not None:
            return True
        return bool(self._aborted or self._refused or self._restores) or self._scheduler.has_work

    @property
    def _restores(self) -> bool:
        return self._restoring is not None and self._restoring.pending

    @property
    def wake_ns(self) -> int:
        times = (self._scheduler.wake_ns, self._idle_audit.due_ns)
        return min(filter(None, times), default=0)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> Iterable[EngineEvent]:
        now_ns = self._clock_ns()
        following = self._following
        if following is not None and self._comes_next(following, now_ns):
            return self._run(following, now_ns, meanwhile)
        self._following = None
        self._settle()
        self._cache.leases.expire()
        self._idle_audit.run_if_due(now_ns, is_idle=not (self._live or self._restores))
        events: list[EngineEvent] = [*self._refused]
        self._refused.clear()
        if self._aborted:
            aborted = list(self._aborted.values())
            self._aborted.clear()
            events += [self._end(request, FinishReason.ABORT, now_ns) for request in aborted]
        late = self._scheduler.expired(now_ns)
        events += [self._end(request, FinishReason.DEADLINE, now_ns) for request in late]
        try:
            if self._restoring is not None:
                self._restoring.collect()
            plan = self._scheduler.plan(now_ns)
        except Exception as fault:
            _log.exception("planning a step failed")
            events += self._fail(list(self._live.values()), f"the scheduler failed: {fault}")
            return events
        for chunk in plan.chunks:
            for copy in chunk.copies:
                self._writers.copy(copy.src, copy.dst)
        events += map(self._start, plan.started)
        if plan.hopeless:
            events += self._fail(plan.hopeless, "the page pool has no room for the request")
        if plan.chunks:
            events += self._run(plan, now_ns, meanwhile)
        else:
            meanwhile()
            if self._restoring is not None and not events:
                self._restoring.wait()
        if not self.has_work:
            self._learn()
            self._meter.rest()
        return events

    def _comes_next(self, following: StepPlan, now_ns: int) -> bool:
        """Whether nothing has happened since it was prepared but that all its requests go on."""
        return not (
            self._aborted
            or self._refused
            or self._restores
            or 0 < self._scheduler.wake_ns <= now_ns
        ) and self._scheduler.still_follows(following)

    def stats(self) -> EngineStats:
        self._settle()
        self._cache.leases.expire()
        self._learn()
        return gather_stats(
            self._totals,
            self._scheduler,
            self._cache,
            self._meter,
            self._idle_audit,
            self._clock_ns(),
        )

    @property
    def load(self) -> EngineLoad:
        return self._scheduler.load

    def warm_up(self) -> None:
        """Compute made-up prompts in free pages, before anything is added: what steps cost is
        known then, and the first request finds all in its place. Ends after `_WARM_UP_NS`.
        A cache that was restored leaves perhaps no free page, and is left alone.
        """
        pages = self._cache.free_pages()
        most = min(self._info.max_context, len(pages) * self._info.page_size, 129) - 1
        if most < 2:
            return
        tokens = np.zeros(most + 1, dtype=np.int32)
        begun_ns = self._clock_ns()
        lone, drafted = (most, most + 1, 1), (max(0, most - 7), most + 1, min(8, most + 1))
        spans = [drafted, (0, most // 2, 1), (most // 2, most, 1), lone]
        for start, end, rows in [(0, 1, 1), *spans, *spans, *spans]:
            chunk = SequenceChunk(tokens, start, end, start, pages, range(end - rows, end))
            before_ns = self._clock_ns()
            self._runner.run([chunk], [], 1)
            now_ns = self._clock_ns()
            if start or end > 1:
                self._scheduler.learn_span(start, end, (now_ns - before_ns) / 1e6, rows)
            if now_ns - begun_ns > _WARM_UP_NS:
                return

    def flush(self) -> int:
        self._settle()
        return self._cache.flush()

    def audit(self) -> PoolStats:
        self._settle()
        try:
            return pool_stats(self._cache.audit())
        except AuditError as error:
            raise EngineError(str(error)) from error

    def ask_cache(self, call: CacheCall) -> CacheAnswer:
        self._settle()
        return self._desk.ask(call)

    def watch_cache(self, on: bool) -> None:
        self._cache.events.watched = on

    def take_cache_events(self) -> tuple[CacheEventInfo, ...]:
        return self._desk.take_events()

    def view(self, *, tree: bool) -> EngineView:
        return self._lookout.view(self.stats(), tree=tree)

    def read_node(self, page: int) -> NodeView | None:
        return self._lookout.read_node(page)

    def save(self) -> None:
        if self._restoring is not None:
            self._restoring.close()
        if self._saved is not None:
            self._saved.save()

    def close(self) -> None:
        if self._restoring is not None:
            self._restoring.close()
        if self._grammars is not None:
            self._grammars.close()
        self._runner.close()
        if self._saved is not None:
            self._saved.close()

    def _logit_rules(self, request: EngineRequest, prompt: Int32Array) -> LogitRules | None:
        sampling = request.sampling
        matcher = None
        if request.grammar and self._grammars is not None:
            matcher = self._grammars.start(request.grammar)
        if matcher is None and not changes_logits(sampling):
            return None
        eos = () if sampling.ignore_eos else self._rules.eos_token_ids
        return LogitRules(sampling, prompt, eos, matcher)

    def _start(self, request: Request) -> Started:
        self._totals.queried_tokens += request.num_prompt_tokens
        self._totals.cached_tokens += request.num_cached_tokens
        assert request.table is not None
        request.donor = self._writers.donor(request.table.pages, request.num_cached_tokens)
        return Started(
            request.id,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            self._clock_ns(),
            self._desk.report(request),
        )

    def _run(
        self, plan: StepPlan, begun_ns: int, meanwhile: Callable[[], None]
    ) -> Iterable[EngineEvent]:
        """Compute the plan. Where it is known what the next step computes, the events are made
        only when they are asked for: that can be while it does."""
        try:
            done = self._computer.compute(
                plan, begun_ns, lambda: self._do_meanwhile(plan, meanwhile)
            )
        except MeanwhileFailed:
            raise
        except Exception as fault:
            _log.exception("a step failed")
            self._following = None
            self._settle()
            self._meter.rest()
            return self._fail([c.request for c in plan.chunks], f"the step failed: {fault}")
        if not self._all_go_on(done):
            self._following = None
            return self._tell(done)
        for chunk, token in zip(plan.chunks, done.tokens, strict=True):
            assert token is not None
            chunk.request.advance(token.token_id)
        self._untold = Untold(lambda: self._tell(done))
        return self._untold

    def _all_go_on(self, done: Computed) -> bool:
        """Whether the step that was prepared comes next, if nothing else happens."""
        if self._following is None:
            return False
        for chunk, token in zip(done.plan.chunks, done.tokens, strict=True):
            if token is None or token.token_id in chunk.request.end_token_ids:
                return False
        return True

    def _tell(self, done: Computed) -> list[EngineEvent]:
        """What a step means for its requests: their events."""
        plan, sampler = done.plan, done.sampler
        begun_ns, now_ns = done.step_ns
        self._totals.steps += 1
        step = self._meter.note(plan.chunks, begun_ns, now_ns, done.kernel_ns)
        self._unlearned = plan, step.wall_ns / 1e6
        events: list[EngineEvent] = []
        chosen = iter(zip(done.tokens, done.rows, strict=False))
        for chunk in plan.chunks:
            request = chunk.request
            request.add_work(step)
            token, row = next(chosen) if chunk.wants_logits else (None, 0)
            if chunk.scored:
                scored = done.told[request.id]
                if scored is None:
                    events += self._fail([request], "the model's logits are not finite")
                    continue
                events.append(scored)
            if chunk.wants_logits and token is None:
                events += self._fail([request], request.fault)
                continue
            said = None
            if token is not None and request.num_tokens > chunk.end:
                said = self._rules.said(request, token.token_id)
            elif token is not None:
                said = self._rules.say(chunk, token, sampler, row)
            events += self._advance(chunk, said, now_ns)
        return events

    def _settle(self) -> None:
        """Make the events of the last step: the books show what they say only then."""
        if self._untold is not None:
            self._untold.settle()
            self._untold = None

    def _do_meanwhile(self, plan: StepPlan, others: Callable[[], None]) -> None:
        """What this step needs none of: it is done while it computes. In the end the next one is
        prepared, if all go on."""
        try:
            others()
            self._settle()
            if plan is self._following:
                self._scheduler.go_on(plan)
            self._learn()
            self._cache.leases.expire()
        except Exception as error:
            raise MeanwhileFailed(str(error)) from error
        self._following = None
        try:
            following = self._scheduler.follow(plan)
            if following is not None:
                self._computer.prepare(following)
                self._following = following
        except Exception:
            # As a plan of its own it fails again, if it must, and then its requests know.
            _log.exception("the next step was not prepared")

    def _learn(self) -> None:
        """Let the scheduler know how long the last step took."""
        if self._unlearned is not None:
            self._scheduler.learn(*self._unlearned)
            self._unlearned = None

    def _advance(
        self, chunk: ScheduledChunk, said: Said | None, now_ns: int
    ) -> Iterator[EngineEvent]:
        """What a computed chunk means for its request."""
        request = chunk.request
        assert request.table is not None
        end = chunk.end if said is None else said.end
        # Slots below `num_valid` were another's, and are only read again.
        written_from = max(chunk.start, chunk.num_valid)
        self._writers.note(request.table.page_ids, written_from, end, request.id)
        self._scheduler.complete(chunk, end, now_ns)
        if request.keep and request.num_computed_tokens >= request.num_prompt_tokens:
            self._desk.keep(request)
        self._totals.computed_tokens += end - chunk.start
        if said is not None:
            self._totals.note(chunk, said)
            yield TokenDelta(
                request.id, pack_tokens(said.token_ids), said.text, now_ns, said.logprobs
            )
            if said.outcome.reason is not None:
                yield self._end(request, said.outcome.reason, now_ns, outcome=said.outcome)
        elif request.num_uncomputed_tokens == 0:
            yield self._end(request, FinishReason.LENGTH, now_ns)

    def _fail(self, requests: Sequence[Request], message: str) -> list[EngineEvent]:
        now_ns = self._clock_ns()
        return [self._end(r, FinishReason.ERROR, now_ns, message=message) for r in requests]

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        *,
        outcome: Outcome | None = None,
        message: str = "",
    ) -> Finished:
        """The one place where a live request ends."""
        del self._live[request.id]
        if not self._live:
            self._idle_audit.rest(now_ns)
        phases = request.close_phases(now_ns)
        good = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._scheduler.finish(request, keep_tail=good)
        return Finished(
            request.id,
            reason,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_output_tokens,
            now_ns,
            num_preemptions=request.num_preemptions,
            stop=outcome.stop if outcome else b"",
            stop_token_id=outcome.stop_token_id if outcome else -1,
            message=message,
            phases=phases,
            leases=tuple(request.leases),
            donor=request.donor,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
        )

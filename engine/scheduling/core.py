"""`EngineCore`: scheduler, runner and sampler as one synchronous engine."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from time import monotonic_ns
from typing import Any

import numpy as np

from engine.api import EngineError, RequestRefused
from engine.core import MeanwhileFailed
from engine.execution.forward_batch import SequenceChunk
from engine.execution.grammar import GrammarCompiler
from engine.execution.penalties import LogitRules, changes_logits
from engine.execution.runner import ModelRunner
from engine.execution.sampler import Sampler, required_top
from engine.execution.saved_cache import SavedCache
from engine.limits import check_request
from engine.scheduling.cache_desk import CacheDesk
from engine.scheduling.idle_audit import IdleAudit
from engine.scheduling.lookout import Lookout
from engine.scheduling.output import Outcome, OutputRules, Said
from engine.scheduling.page_writers import PageWriters
from engine.scheduling.request import Request
from engine.scheduling.restoring import Restoring
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scoring import score_prompts
from engine.scheduling.step_meter import StepMeter
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.scheduling.totals import Totals
from engine.stats import EngineLoad, EngineStats, LeaseStats, PoolStats
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
from prefix_cache.cache import AuditError, PoolCounts, PrefixCache

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
        return bool(self._aborted or self._refused or self._restores) or self._scheduler.has_work

    @property
    def _restores(self) -> bool:
        return self._restoring is not None and self._restoring.pending

    @property
    def wake_ns(self) -> int:
        times = (self._scheduler.wake_ns, self._idle_audit.due_ns)
        return min(filter(None, times), default=0)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> Sequence[EngineEvent]:
        now_ns = self._clock_ns()
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

    def stats(self) -> EngineStats:
        self._cache.leases.expire()
        self._learn()
        totals, meter = self._totals, self._meter
        running = self._scheduler.running
        num_disk, num_restored, num_damaged = self._cache.count_disk()
        return EngineStats(
            pool=_pool_stats(self._cache.stats()),
            running=len(running),
            waiting=len(self._scheduler.waiting),
            paused=sum(request.paused for request in running),
            step_ns=meter.step_ns.distribution(),
            step_tokens=meter.step_tokens.distribution(),
            chunk_tokens=meter.chunk_tokens.distribution(),
            work=meter.work(),
            recent_steps=meter.recent_steps(),
            peak_bytes_per_s=meter.peaks.bytes_per_s if meter.peaks else 0.0,
            peak_flops_per_s=meter.peaks.flops_per_s if meter.peaks else 0.0,
            evicted_pages={
                "room": self._cache.evicted_for_room,
                "flush": self._cache.evicted_by_flush,
            },
            num_queried_tokens=totals.queried_tokens,
            num_steps=totals.steps,
            num_requests=totals.requests,
            num_prompt_tokens=totals.prompt_tokens,
            num_cached_tokens=totals.cached_tokens,
            num_computed_tokens=totals.computed_tokens,
            num_output_tokens=totals.output_tokens,
            num_forced_tokens=totals.forced_tokens,
            num_drafts=totals.drafts,
            num_draft_tokens=totals.draft_tokens,
            num_accepted_tokens=totals.accepted_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_disk_pages=num_disk,
            num_restored_pages=num_restored,
            num_damaged_pages=num_damaged,
            num_audits=self._idle_audit.num_audits,
            num_audit_differences=self._idle_audit.num_differences,
            num_quarantined_pages=self._idle_audit.num_quarantined_pages,
            leases=LeaseStats(*self._cache.leases.count()),
            scheduling=self._scheduler.stats(self._clock_ns()),
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
        return self._cache.flush()

    def audit(self) -> PoolStats:
        try:
            return _pool_stats(self._cache.audit())
        except AuditError as error:
            raise EngineError(str(error)) from error

    def ask_cache(self, call: CacheCall) -> CacheAnswer:
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
    ) -> list[EngineEvent]:
        """Compute the chunks and turn what comes out into events."""
        chunks = plan.chunks
        sampled = [chunk for chunk in chunks if chunk.wants_logits]
        rows = [chunk.request.sampling for chunk in sampled]
        scores = any(chunk.scored for chunk in chunks)
        masked = any(chunk.request.logit_rules is not None for chunk in sampled)
        copies = [(copy.src, copy.dst) for chunk in chunks for copy in chunk.copies]
        try:
            logits = self._runner.run(
                [_sequence_chunk(chunk) for chunk in chunks],
                copies,
                0 if scores or masked else required_top(rows, self._info.vocab_size),
                lambda: self._do_meanwhile(meanwhile),
            )
            told, logits = (
                score_prompts(chunks, logits, self._clock_ns()) if scores else ({}, logits)
            )
            sampler = Sampler(logits)
            firsts = [0, *accumulate(chunk.num_sampled for chunk in sampled)]
            tokens = [
                sampler.choose(first, each, chunk.request.num_tokens, chunk.request.logit_rules)
                for first, each, chunk in zip(firsts, rows, sampled, strict=False)
            ]
        except MeanwhileFailed:
            raise
        except Exception as fault:
            _log.exception("a step failed")
            self._meter.rest()
            return self._fail([c.request for c in chunks], f"the step failed: {fault}")
        self._totals.steps += 1
        now_ns = self._clock_ns()
        step = self._meter.note(chunks, begun_ns, now_ns, self._runner.kernel_ns)
        self._unlearned = plan, step.wall_ns / 1e6
        events: list[EngineEvent] = []
        chosen = iter(zip(tokens, firsts, strict=False))
        for chunk in chunks:
            chunk.request.add_work(step)
            token, row = next(chosen) if chunk.wants_logits else (None, 0)
            if chunk.scored:
                scored = told[chunk.request.id]
                if scored is None:
                    events += self._fail([chunk.request], "the model's logits are not finite")
                    continue
                events.append(scored)
            if chunk.wants_logits and token is None:
                events += self._fail([chunk.request], chunk.request.fault)
                continue
            said = None if token is None else self._rules.say(chunk, token, sampler, row)
            events += self._advance(chunk, said, now_ns)
        return events

    def _do_meanwhile(self, others: Callable[[], None]) -> None:
        """What the next step computed needs none of: it is done while that computes."""
        try:
            others()
            self._learn()
        except Exception as error:
            raise MeanwhileFailed(str(error)) from error

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


def _sequence_chunk(chunk: ScheduledChunk) -> SequenceChunk:
    request = chunk.request
    assert request.table is not None
    return SequenceChunk(
        request.token_ids_with(chunk.drafts),
        chunk.start,
        chunk.end,
        chunk.num_valid,
        request.table.page_ids,
        chunk.logits,
        request.table,
    )


def _pool_stats(counts: PoolCounts) -> PoolStats:
    return PoolStats(
        total=counts.total,
        free=counts.free,
        cached=counts.cached,
        referenced=counts.referenced,
        pinned=counts.pinned,
    )

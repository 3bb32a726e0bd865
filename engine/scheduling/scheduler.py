"""One rule: in every step, the computed tokens of each request catch up with its known ones."""

from bisect import insort
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Final

from engine.scheduling.admission import MOST_PER_STEP, Admission
from engine.scheduling.drafting import choose_drafts
from engine.scheduling.fairness import OUTPUT_WEIGHT
from engine.scheduling.itl_controller import ItlController, Room
from engine.scheduling.load_meter import LoadMeter
from engine.scheduling.preemption import Preemption
from engine.scheduling.prefill_lanes import served_oldest
from engine.scheduling.ranking import Ranking
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.restoring import Restoring
from engine.scheduling.spacing import Spacing
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.scheduling.waiting_queue import WaitingQueue
from engine.stats import EngineLoad, SchedulingStats
from prefix_cache.cache import PageCopy, PrefixCache
from prefix_cache.in_flight import InFlight

_LOAD_EVERY: Final = 8
"""While streams just go on, their load is worked out in one of so many steps."""


class Scheduler:
    """Owns the requests and their pages; touched only by the engine's thread.

    A step takes a token of each request that decodes, and as many of those that their grammars
    forced behind it, and of drafts that are worth it, as the room takes that `ItlController`
    leaves, or half of it if there are prompts; then chunks of these side by side, in the rest of
    it and the shares of `prefill_lanes`.
    `Admission` says who joins, `Preemption` who gives up pages when they run out: its computed
    tokens stay cached, it waits in its old place, and goes on from whatever is still cached then.
    """

    def __init__(
        self,
        cache: PrefixCache,
        controller: ItlController,
        *,
        page_size: int,
        max_running: int,
        ttft_target_ms: float,
        clock_ns: Callable[[], int] = monotonic_ns,
        restoring: Restoring | None = None,
        speculation: bool = False,
    ) -> None:
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._cache = cache
        self._controller = controller
        self._in_flight: InFlight[Request] = InFlight(page_size)
        self._preemption = Preemption(cache, page_size)
        self._ranking = Ranking(controller.model, ttft_target_ms)
        self._spacing = Spacing()
        self._admission = Admission(
            cache, self._in_flight, self._preemption, self._ranking, page_size, restoring
        )
        self._meter = LoadMeter(controller, max_running)
        self._page_size = page_size
        self._max_running = max_running
        self._clock_ns = clock_ns
        self._deadlines: list[Request] = []
        self._restoring = restoring
        self._speculation = speculation
        self._load: EngineLoad | None = None
        self._load_age = 0

    @property
    def waiting(self) -> WaitingQueue:
        """Those that hold no pages."""
        return self._admission.waiting

    @property
    def has_work(self) -> bool:
        """Whether `plan` would schedule anything: False while all want for credit."""
        return any(not r.paused for r in self.running) or any(not r.paused for r in self.waiting)

    @property
    def wake_ns(self) -> int:
        """The earliest deadline of a live request; 0 for none."""
        return self._deadlines[0].deadline_ns if self._deadlines else 0

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue."""
        self.waiting.add(request)
        self._ranking.fairness.join(request.tenant)
        if request.deadline_ns:
            insort(self._deadlines, request, key=_deadline)

    def expired(self, now_ns: int) -> list[Request]:
        """Live requests whose deadline has passed."""
        if not 0 < self.wake_ns <= now_ns:
            return []
        return [request for request in self._deadlines if request.deadline_ns <= now_ns]

    def plan(self, now_ns: int) -> StepPlan:
        """Choose the next step and make room for its writes: admits and preempts as needed.

        Everything planned must be answered by `complete` or `finish`.
        """
        self._forget_load()
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            if not request.paused:
                (decodes if request.is_decoding else prefills).append(request)
        room = self._controller.room(decodes)
        moving = (*decodes, *prefills)
        prompts = bool(self.waiting) or any(r.num_computed_tokens < r.prefill_end for r in moving)
        plan = StepPlan()
        if prompts and decodes and self._controller.is_free and len(self.waiting) <= MOST_PER_STEP:
            prompts = not self._spacing.holds_back([*prefills, *self.waiting], now_ns)
        part = room.halve() if prompts else room
        wanted = _with_forced(decodes, part)
        drafts = self._drafts(wanted, part, prompts)
        if prompts:
            room.take_back(part)
            wanted += self._prompts(prefills, room, plan, now_ns)
            wanted.sort(key=lambda entry: entry[0].order)
        num_before = self.num_preemptions
        for request, num_tokens in wanted:
            self._schedule(request, num_tokens, plan, now_ns, drafts.get(request, ()))
        if wanted and not plan.chunks and self.num_preemptions == num_before:
            self._unblock(wanted[0][0], plan, now_ns)
        self._controller.note(plan)
        self._spacing.note(plan)
        return plan

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """What `plan` will choose after the step of this plan, which is being computed, if each of
        its requests says a token and goes on, and nothing else happens. None where that is not
        known, or where it has no room; its pages are taken already."""
        if len(self.running) != len(plan.chunks) or self.waiting:
            return None
        following = StepPlan()
        for request, chunk in zip(self.running, plan.chunks, strict=True):
            if request is not chunk.request or not chunk.is_followed:
                return None
            if self._extend_beside_reserved(request, chunk.end + 1) is None:
                return None
            end = chunk.end + 1
            following.chunks.append(ScheduledChunk(request, end - 1, end, end - 1, (), True))
        return following

    def still_follows(self, plan: StepPlan) -> bool:
        """Whether `plan` would choose just that of `follow` now that all its requests have said a
        token and go on."""
        if self.waiting or len(self.running) != len(plan.chunks):
            return False
        if not self._speculation:
            return True
        room = self._controller.room(self.running)
        return not self._drafts([(request, 1) for request in self.running], room, prompts=False)

    def go_on(self, plan: StepPlan) -> None:
        """The plan of `follow` is computed."""
        self._controller.note(plan)
        self._load_age += 1
        if self._load_age == _LOAD_EVERY:
            self._forget_load()

    def _forget_load(self) -> None:
        self._load, self._load_age = None, 0

    def _prompts(
        self, prefills: Sequence[Request], room: Room, plan: StepPlan, now_ns: int
    ) -> list[tuple[Request, int]]:
        """Prompts under way and those that are admitted, and how much of each the room takes."""
        self._ranking.watch([*self.waiting.heads(), *prefills], now_ns)
        admitted = self._admission.admit(
            self.running,
            room,
            lambda request, num: self._has_place(request, num, now_ns),
            lambda: self._preempt_paused(now_ns),
        )
        ready = [r for r in (*prefills, *admitted) if r.table is not None]
        claims = self._ranking.claims(ready)
        shares = self._ranking.share(claims, room, len(prefills) + len(self.waiting))
        plan.is_full = any(n < claim.want for n, claim in zip(shares, claims, strict=True))
        plan.passes_oldest = not served_oldest(claims, shares) if claims else len(self.waiting) > 0
        return list(zip(ready, shares, strict=True))

    def complete(self, chunk: ScheduledChunk, end: int, now_ns: int) -> None:
        """The step computed this chunk, and up to `end`, the first draft that the request did not
        say, it is good: others may match it from now on."""
        request = chunk.request
        assert request.table is not None
        request.num_computed_tokens = end
        if chunk.scored:
            request.num_scored = chunk.scored.stop
        self._cache.publish(request.table, request.token_ids, end)
        length = end - chunk.start
        served = float(length)
        if chunk.start < request.prefill_end:
            request.stamp("prefill", now_ns, num_tokens=length, start_position=chunk.start)
            if end == request.prefill_end:
                self._in_flight.unregister(request)
        else:
            served *= OUTPUT_WEIGHT
        self._ranking.fairness.charge(request.tenant, served, request.weight)

    def learn(self, plan: StepPlan, took_ms: float) -> None:
        """The step of this plan, not completed yet, took so long after the last one."""
        self._controller.learn(plan, took_ms)
        prefill = [c.end - c.start for c in plan.chunks if c.start < c.request.prefill_end]
        streams = len(plan.chunks) > len(prefill)
        self._meter.note_step(sum(prefill), took_ms / 1e3, full=plan.is_full, streams=streams)

    def learn_span(self, start: int, end: int, took_ms: float, rows: int) -> None:
        """A step of tokens [start, end) of one sequence, with logits of the last `rows`, outside
        any plan, took so long."""
        self._controller.learn_span(start, end, took_ms, rows)

    @property
    def load(self) -> EngineLoad:
        """What a request that comes now has to reckon with; while the same streams just go on, it
        is a few steps old."""
        load = self._load
        if load is None or not self._load_age:
            self._load = load = self._meter.load(self.running)
        return load

    def stats(self, now_ns: int) -> SchedulingStats:
        """How the promises are kept."""
        controller = self._controller
        oldest_ns = min((request.arrival_ns for request in self.waiting), default=now_ns)
        return SchedulingStats(
            itl_target_ms=controller.target_ms,
            ttft_target_ms=self._ranking.ttft_target_ms,
            itl_p50_ms=controller.itl_ms(0.5),
            itl_p95_ms=controller.itl_ms(0.95),
            chunk_p50_tokens=controller.chunk_tokens(0.5),
            step_error=controller.model.error,
            oldest_waiting_ms=(now_ns - oldest_ns) / 1e6,
            waiting_tokens=self.waiting.num_tokens,
            num_floor_steps=controller.num_floor_steps,
            load=self._meter.load(self.running),
        )

    def finish(self, request: Request, *, keep_tail: bool) -> None:
        """Take the request out and release its pages. With `keep_tail` its last, partly filled
        page stays cached too; else only what `complete` has published."""
        self._forget_load()
        running = request.status is RequestStatus.RUNNING
        (self.running if running else self.waiting).remove(request)
        self._ranking.fairness.leave(request.tenant)
        self._meter.note_end(request)
        if request.deadline_ns:
            self._deadlines.remove(request)
        if request.table is not None:
            self._let_go(request, keep_tail=keep_tail)
        request.move_to(RequestStatus.FINISHED)

    def _has_place(self, request: Request, num_admitted: int, now_ns: int) -> bool:
        """Whether one more may run: by count, and by what its stream will cost the others,
        which is nothing for one at a time that says next to nothing."""
        while len(self.running) + num_admitted >= self._max_running:
            if not self._preempt_paused(now_ns):
                return False
        moving = [request for request in self.running if not request.paused]
        if self._meter.has_place(request, moving, num_admitted):
            return True
        return not num_admitted and request.is_brief and not any(r.is_brief for r in moving)

    def _drafts(
        self, wanted: Sequence[tuple[Request, int]], room: Room, prompts: bool
    ) -> dict[Request, tuple[int, ...]]:
        """What streams may say after the tokens they compute. While `prompts` wait for the room
        that a target leaves, it is theirs."""
        if not self._speculation or (prompts and self._controller.target_ms):
            return {}
        return choose_drafts(wanted, room, self._controller)

    def _schedule(
        self,
        request: Request,
        num_tokens: int,
        plan: StepPlan,
        now_ns: int,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Make the slots of a chunk writable and put it into the plan, if there is room. For
        drafts nobody is made to give up pages: without room they are left out."""
        if request.table is None:
            return  # preempted for an earlier one of this plan
        fresh = request.status is not RequestStatus.RUNNING
        copies: tuple[PageCopy, ...] | None = None
        if drafts:
            copies = self._extend_beside_reserved(request, request.num_tokens + len(drafts))
        if copies is None:
            drafts = ()
            copies = self._extend(request, num_tokens, plan, now_ns) if num_tokens else None
        if copies is None or request.table is None:
            if fresh:
                self._admission.withdraw(request)
            return
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        wants_logits = request.samples and end == request.num_tokens
        scored = range(max(start, request.num_scored), min(end, request.num_prompt_tokens - 1))
        end += len(drafts)
        if fresh:
            self._start(request, plan, now_ns)
        plan.chunks.append(
            ScheduledChunk(
                request, start, end, request.table.num_tokens, copies, wants_logits, scored, drafts
            )
        )

    def _unblock(self, request: Request, plan: StepPlan, now_ns: int) -> None:
        """Not even the first in order has room, with nobody left to take pages from. If it runs,
        it holds a shared page that it cannot copy: it goes back, to be matched without that page.
        If it could not even begin with nothing else running, leases give way to it, one each
        step; once there are none, it never will. What is held for pages from disk comes free soon.
        """
        if self._restoring is not None and self._restoring.pending:
            return
        if request.status is RequestStatus.RUNNING:
            self._put_back(request, now_ns)
        elif not self.running and self._cache.leases.break_one() is None:
            plan.hopeless.append(request)

    def _extend(
        self, request: Request, num_tokens: int, plan: StepPlan, now_ns: int
    ) -> tuple[PageCopy, ...] | None:
        """Writable slots for the next `num_tokens`, or None. A running request takes pages from
        others, or gives up its own; one that is only being admitted takes from nobody."""
        assert request.table is not None
        end = request.num_computed_tokens + num_tokens
        copies = self._extend_beside_reserved(request, end)
        if request.status is RequestStatus.RUNNING:
            while copies is None:
                victim = self._preemption.victim(request, self.running)
                if victim is None:
                    return None
                self._preempt(victim, plan, now_ns)
                if victim is request:
                    return None
                copies = self._extend_beside_reserved(request, end)
        elif copies is None and not self.running:
            self._admission.retake_whole_pages(request)
            end = min(request.num_computed_tokens + num_tokens, request.num_tokens)
            copies = self._cache.extend(request.table, end)
        return copies

    def _extend_beside_reserved(self, request: Request, end: int) -> tuple[PageCopy, ...] | None:
        assert request.table is not None
        if end > request.table.num_writable:
            counts = self._cache.stats()
            more = -(-end // self._page_size) - len(request.table.pages)
            reserved = self._preemption.reserved_pages(request, self.running)
            if reserved and more + reserved > counts.free + counts.cached:
                return None
        return self._cache.extend(request.table, end)

    def _start(self, request: Request, plan: StepPlan, now_ns: int) -> None:
        """The first chunk is planned: the request runs."""
        self.waiting.remove(request)
        if not request.was_started:
            request.was_started = True
            request.num_cached_tokens = request.num_computed_tokens
            plan.started.append(request)
            self._meter.note_start(request)
        request.num_passed_tokens = 0
        request.stamp("queue", now_ns)
        matched = request.num_computed_tokens
        request.stamp(
            "prefix_match",
            self._clock_ns(),
            num_tokens=matched,
            num_disk_tokens=min(matched, request.num_restored_tokens),
        )
        request.num_restored_tokens = 0
        request.was_restored = False
        request.move_to(RequestStatus.RUNNING)
        self.running.append(request)

    def _preempt_paused(self, now_ns: int) -> bool:
        """Put back the last one that has no credit; False if there is none."""
        for request in reversed(self.running):
            if request.paused:
                self._put_back(request, now_ns)
                return True
        return False

    def _preempt(self, request: Request, plan: StepPlan, now_ns: int) -> None:
        """Take away the pages of a request, and its chunk if it was planned already."""
        plan.chunks = [chunk for chunk in plan.chunks if chunk.request is not request]
        if not request.paused:
            request.num_preemptions += 1
            self.num_preemptions += 1
        self._put_back(request, now_ns)

    def _put_back(self, request: Request, now_ns: int) -> None:
        """Give up the pages; what was computed stays cached for as long as there is room."""
        self.running.remove(request)
        request.stamp_current(now_ns)
        self._let_go(request, keep_tail=True)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        self.waiting.add(request)

    def _let_go(self, request: Request, *, keep_tail: bool) -> None:
        assert request.table is not None
        self._in_flight.unregister(request)
        if keep_tail:
            self._cache.publish(
                request.table, request.token_ids, request.num_computed_tokens, tail=True
            )
        self._cache.release(request.table)
        request.table = None


def _with_forced(decodes: Sequence[Request], room: Room) -> list[tuple[Request, int]]:
    """What each stream computes: its own token, which the room is made for, and forced ones."""
    return [
        (r, 1 + room.take(r.num_computed_tokens + 1, r.num_uncomputed_tokens - 1, begun=True))
        for r in decodes
    ]


def _deadline(request: Request) -> int:
    return request.deadline_ns

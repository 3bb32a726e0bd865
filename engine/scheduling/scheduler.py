"""One rule: in every step, the computed tokens of each request catch up with its known ones."""

from bisect import insort
from time import monotonic_ns

from engine.scheduling.admission import Admission
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.step_plan import ScheduledChunk, StepPlan, fair_shares
from prefix_cache.cache import PageCopy, PrefixCache
from prefix_cache.in_flight import InFlight

MAX_SCORED_ROWS = 64
"""Prompt positions scored per step: each needs a whole row of logits."""


class Scheduler:
    """Owns the requests and their pages; touched only by the engine's thread.

    A step takes requests with one uncomputed token first (they decode), then chunks of several
    others side by side. Requests are served in `Request.order`. When pages run out, the last one
    in that order that is not yet in the plan gives up its pages, those without credit before all
    others: its computed tokens stay cached, it waits in its old place, and goes on from whatever
    is still cached then. The first in order can take pages from everyone else, so it always moves.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        page_size: int,
        token_budget: int,
        decode_token_budget: int,
        max_running: int,
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._cache = cache
        self._in_flight: InFlight[Request] = InFlight(page_size)
        self._admission = Admission(cache, self._in_flight, page_size)
        self._page_size = page_size
        self._token_budget = token_budget
        self._decode_token_budget = decode_token_budget
        self._max_running = max_running
        self._deadlines: list[Request] = []

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
        insort(self.waiting, request, key=_order)
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
        decodes = [r for r in self.running if not r.paused and r.num_uncomputed_tokens == 1]
        prefills = [r for r in self.running if not r.paused and r.num_uncomputed_tokens > 1]
        budget = self._prefill_budget(len(decodes))
        fresh = self._admit(budget - sum(map(self._least_share, prefills)), now_ns)
        prefills += fresh
        shares = fair_shares(_wants(prefills), budget)
        wanted = [(r, 1) for r in decodes] + list(zip(prefills, shares, strict=True))
        if prefills:
            wanted.sort(key=lambda entry: entry[0].order)
        plan = StepPlan()
        for request, num_tokens in wanted:
            self._schedule(request, num_tokens, plan, now_ns)
        if wanted and not plan.chunks:
            self._unblock(wanted[0][0], plan, now_ns)
        return plan

    def complete(self, chunk: ScheduledChunk, now_ns: int) -> None:
        """The step computed this chunk, and it is good: others may match it from now on."""
        request = chunk.request
        assert request.table is not None
        request.num_computed_tokens = chunk.end
        if chunk.scored:
            request.num_scored = chunk.scored.stop
        self._cache.publish(request.table, request.token_ids, chunk.end)
        if chunk.start < request.prefill_end:
            request.stamp(
                "prefill",
                now_ns,
                num_tokens=chunk.end - chunk.start,
                start_position=chunk.start,
            )
            if chunk.end == request.prefill_end:
                self._in_flight.unregister(request)

    def finish(self, request: Request, *, keep_tail: bool) -> None:
        """Take the request out and release its pages. With `keep_tail` its last, partly filled
        page stays cached too; else only what `complete` has published."""
        running = request.status is RequestStatus.RUNNING
        (self.running if running else self.waiting).remove(request)
        if request.deadline_ns:
            self._deadlines.remove(request)
        if request.table is not None:
            self._let_go(request, keep_tail=keep_tail)
        request.move_to(RequestStatus.FINISHED)

    def _prefill_budget(self, num_decodes: int) -> int:
        """Prefills always move by at least a page, however many others decode."""
        budget = self._token_budget
        if num_decodes:
            budget = min(budget, self._decode_token_budget) - num_decodes
        return max(budget, self._page_size)

    def _least_share(self, request: Request) -> int:
        """Of a step's tokens: a page, or what remains. Thinner chunks of more requests would
        only delay all of them."""
        return min(request.num_uncomputed_tokens, self._page_size)

    def _admit(self, num_tokens: int, now_ns: int) -> list[Request]:
        """Match waiting requests in order, until one finds no place or `num_tokens` are used up;
        followers are passed over. Those returned hold references but still stand in `waiting`.
        """
        admitted: list[Request] = []
        if num_tokens <= 0 or not self.waiting:
            return admitted
        for request in tuple(self.waiting):
            if num_tokens <= 0:
                break
            if request.paused or self._admission.follows(request):
                continue
            full = len(self.running) + len(admitted) >= self._max_running
            if full and not self._preempt_paused(now_ns):
                break
            self._admission.take(request)
            while not self._admission.fits(request, self.running + admitted):
                if not self._preempt_paused(now_ns):
                    self._admission.withdraw(request)
                    return admitted
            admitted.append(request)
            num_tokens -= self._least_share(request)
        return admitted

    def _schedule(self, request: Request, num_tokens: int, plan: StepPlan, now_ns: int) -> None:
        """Make the slots of a chunk writable and put it into the plan, if there is room."""
        if request.table is None:
            return  # preempted for an earlier one of this plan
        fresh = request.status is not RequestStatus.RUNNING
        copies = self._extend(request, num_tokens, now_ns) if num_tokens else None
        if copies is None:
            if fresh:
                self._admission.withdraw(request)
            return
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        wants_logits = request.samples and end == request.num_tokens
        scored = range(max(start, request.num_scored), min(end, request.num_prompt_tokens - 1))
        if fresh:
            self._start(request, now_ns)
            if not request.num_preemptions:
                plan.started.append(request)
        plan.chunks.append(
            ScheduledChunk(
                request, start, end, request.table.num_tokens, copies, wants_logits, scored
            )
        )

    def _unblock(self, request: Request, plan: StepPlan, now_ns: int) -> None:
        """Not even the first in order has room, with nobody left to take pages from. If it runs,
        it holds a shared page that it cannot copy: it goes back, to be matched without that page.
        If it could not even begin with nothing else running, it never will."""
        if request.status is RequestStatus.RUNNING:
            self._preempt(request, now_ns)
        elif not self.running:
            plan.hopeless.append(request)

    def _extend(
        self, request: Request, num_tokens: int, now_ns: int
    ) -> tuple[PageCopy, ...] | None:
        """Writable slots for the next `num_tokens`, or None. A running request takes pages from
        later ones; one that is only being admitted takes from nobody."""
        assert request.table is not None
        end = request.num_computed_tokens + num_tokens
        copies = self._cache.extend(request.table, end)
        if request.status is RequestStatus.RUNNING:
            while copies is None and (victim := self._victim(request)) is not None:
                self._preempt(victim, now_ns)
                copies = self._cache.extend(request.table, end)
        elif copies is None and not self.running:
            self._admission.retake_whole_pages(request)
            end = min(request.num_computed_tokens + num_tokens, request.num_tokens)
            copies = self._cache.extend(request.table, end)
        return copies

    def _start(self, request: Request, now_ns: int) -> None:
        """The first chunk is planned: the request runs."""
        self.waiting.remove(request)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        request.stamp("queue", now_ns)
        request.stamp("prefix_match", monotonic_ns(), num_tokens=request.num_computed_tokens)
        request.move_to(RequestStatus.RUNNING)
        insort(self.running, request, key=_order)

    def _victim(self, request: Request) -> Request | None:
        """Who gives up pages for `request`: one without credit, else the last one behind it."""
        for other in reversed(self.running):
            if other.paused and other is not request:
                return other
        last = self.running[-1]
        return last if last.order > request.order else None

    def _preempt_paused(self, now_ns: int) -> bool:
        for request in reversed(self.running):
            if request.paused:
                self._preempt(request, now_ns)
                return True
        return False

    def _preempt(self, request: Request, now_ns: int) -> None:
        """Give up the pages; what was computed stays cached for as long as there is room."""
        self.running.remove(request)
        request.stamp_current(now_ns)
        self._let_go(request, keep_tail=True)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_order)

    def _let_go(self, request: Request, *, keep_tail: bool) -> None:
        assert request.table is not None
        self._in_flight.unregister(request)
        if keep_tail:
            self._cache.publish(
                request.table, request.token_ids, request.num_computed_tokens, tail=True
            )
        self._cache.release(request.table)
        request.table = None


def _wants(prefills: list[Request]) -> list[int]:
    """How many tokens each could compute now: what is left, less where its prompt is scored."""
    num_scoring = sum(request.is_scoring for request in prefills)
    most = max(1, MAX_SCORED_ROWS // num_scoring) if num_scoring else 0
    return [
        min(request.num_uncomputed_tokens, most)
        if request.is_scoring
        else request.num_uncomputed_tokens
        for request in prefills
    ]


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _deadline(request: Request) -> int:
    return request.deadline_ns

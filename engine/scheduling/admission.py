"""Which waiting requests take pages and join the next step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.scheduling.itl_controller import Room
from engine.scheduling.preemption import Preemption
from engine.scheduling.ranking import Ranking
from engine.scheduling.request import Request
from engine.scheduling.restoring import Restoring
from engine.scheduling.waiting_queue import WaitingQueue
from prefix_cache.cache import PrefixCache
from prefix_cache.in_flight import InFlight

MOST_PER_STEP = 16
"""Requests admitted in one step; a crowd of warm ones takes several, each of them short."""


@dataclass(slots=True)
class Admission:
    """Matches waiting requests and decides whether their known need fits beside what runs.

    Who would get a part of the step's room is admitted, in that order. One that finds no pages is
    passed by smaller ones, until these took as many tokens as the pool holds: then nobody passes.
    A request that waits holds no references: it is matched here, and `withdraw` undoes it when
    its first chunk finds no place after all.
    """

    cache: PrefixCache
    in_flight: InFlight[Request]
    preemption: Preemption
    ranking: Ranking
    page_size: int
    restoring: Restoring | None = None
    waiting: WaitingQueue = field(default_factory=WaitingQueue)

    def admit(
        self,
        running: Sequence[Request],
        room: Room,
        has_place: Callable[[Request, int], bool],
        make_room: Callable[[], bool],
    ) -> list[Request]:
        """Those that join the running ones: they hold references but still stand in `waiting`.

        `has_place` says whether this one may run beside so many that were admitted; `make_room`
        takes pages from somebody who has no use for them now, or returns False.
        """
        admitted: list[Request] = []
        passed: list[Request] = []
        candidates = self.waiting.look(self.ranking.served, self._may_start)
        while candidates and len(admitted) < MOST_PER_STEP:
            request = self._next(running, admitted, candidates, room)
            if request is None:
                break
            if not has_place(request, len(admitted)):
                if request.is_brief:
                    break
                candidates = [other for other in candidates if other.is_brief]
                continue
            candidates.remove(request)
            if self.follows(request) or self._waits_for_disk(request):
                continue
            self.take(request)
            if self._share_tail(request, running):
                self.withdraw(request)
                self.take(request)
            while not (fits := self.fits(request, [*running, *admitted])) and make_room():
                pass
            if fits:
                admitted.append(request)
                for other in passed:
                    other.num_passed_tokens += request.num_tokens
                continue
            self.withdraw(request)
            passed.append(request)
            if request.num_passed_tokens >= self.cache.stats().total * self.page_size:
                break
        return admitted

    def _next(
        self,
        running: Sequence[Request],
        admitted: Sequence[Request],
        candidates: Sequence[Request],
        room: Room,
    ) -> Request | None:
        """The first candidate that the step has room for, beside all that prefill already."""
        prefills = [r for r in running if not r.paused and not r.is_decoding]
        taken = [*prefills, *admitted]
        claims = self.ranking.claims([*taken, *candidates])
        shares = self.ranking.share(claims, room.copy(), len(self.waiting) + len(prefills))
        served = [r for r, tokens in zip(candidates, shares[len(taken) :], strict=True) if tokens]
        return min(served, key=self.ranking.age, default=None)

    def _may_start(self, request: Request) -> bool:
        if request.restore is not None and not request.restore.ended:
            return False
        return not request.paused and not self.follows(request)

    def _waits_for_disk(self, request: Request) -> bool:
        if self.restoring is None:
            return False
        return self.restoring.holds_back(request, self.ranking.model.chunk_ms)

    def follows(self, request: Request) -> bool:
        """Whether the next page of the request is being computed by a running one, which it
        need not compute itself; that one is served as if it were as urgent then.

        While that one goes on towards the last page they share nothing is compared again, so a
        crowd of followers costs a step next to nothing.
        """
        leader = request.leader
        if (
            leader is None
            or leader.table is None
            or leader.num_computed_tokens >= request.leads_until
        ):
            matched = self.cache.peek(request.namespace, request.token_ids)
            if request.num_matched_on_arrival < 0:
                request.num_matched_on_arrival = matched
            request.num_matched_tokens = matched
            if request.is_scoring:
                return False
            leader = self.in_flight.leader(request.namespace, request.token_ids, matched)
            request.leader = leader
            request.leads_until = self._shared_whole_pages(request, leader) if leader else 0
        if leader is not None:
            leader.lent_priority = min(leader.lent_priority, request.priority)
        return leader is not None

    def take(self, request: Request, limit: int | None = None) -> None:
        """Match at most `limit` tokens: the request holds their pages. Of a full match the last
        token is recomputed, for its logits, and so is all from the first position that is to be
        scored."""
        if request.is_scoring:
            limit = request.num_scored if limit is None else min(limit, request.num_scored)
        match = self.cache.match(request.namespace, request.token_ids, limit)
        request.table = match.table
        request.num_matched_tokens = match.num_cached_tokens
        request.explanation = match.explanation
        request.num_computed_tokens = min(match.num_cached_tokens, request.num_tokens - 1)
        request.prefill_end = request.num_tokens
        self.in_flight.register(request, request.namespace, request.token_ids, match.table)

    def _share_tail(self, request: Request, running: Sequence[Request]) -> bool:
        """Publish the half-filled page of a running response that a taken request goes on from,
        further than its match; whether there was one. Whoever writes there next gets a copy."""
        assert request.table is not None
        matched = request.table.num_tokens
        start = matched - matched % self.page_size
        index = start // self.page_size
        limit = request.num_scored if request.is_scoring else request.num_tokens
        ahead = request.token_ids[start : matched + 1]
        for other in running:
            table = other.table
            if (
                table is None
                or matched >= limit
                or other.num_computed_tokens <= matched
                or table.namespace != request.namespace
                or table.pages[:index][-1:] != request.table.pages[:index][-1:]
                or not np.array_equal(other.token_ids[start : matched + 1], ahead)
            ):
                continue
            self.cache.publish(table, other.token_ids, other.num_computed_tokens, tail=True)
            return True
        return False

    def retake_whole_pages(self, request: Request) -> None:
        """Match again without the shared page that would have to be copied: in a pool with no
        page left for the copy, that page itself can be evicted and written."""
        assert request.table is not None
        limit = request.table.num_tokens // self.page_size * self.page_size
        self.withdraw(request)
        self.take(request, limit)

    def withdraw(self, request: Request) -> None:
        """Give back what `take` took."""
        assert request.table is not None
        self.in_flight.unregister(request)
        self.cache.release(request.table)
        request.table = None
        request.num_computed_tokens = 0

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether all known tokens of a taken request fit into free and evictable pages, after
        the known needs of those that run, and with a page to grow for each of them.

        Asking for the whole need, not for the next chunk, is what keeps a preempted long prompt
        from being readmitted, filling the pool and being preempted again, for ever.
        """
        if not running:
            return True
        assert request.table is not None
        missing = self.preemption.missing_pages
        counts = self.cache.stats()
        need = sum(map(missing, running)) + len(running)
        copied = request.table.num_tokens % self.page_size > 0
        return need + missing(request) + copied <= counts.free + counts.cached

    def _shared_whole_pages(self, one: Request, other: Request) -> int:
        """Tokens from the start that two requests have in common, in whole pages."""
        length = min(one.num_tokens, other.num_tokens)
        differs = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
        common = int(differs[0]) if differs.size else length
        return common // self.page_size * self.page_size

"""Which waiting requests take pages and join the next step."""

from dataclasses import dataclass

import numpy as np

from engine.scheduling.request import Request
from prefix_cache.cache import PrefixCache
from prefix_cache.in_flight import InFlight


@dataclass(slots=True)
class Admission:
    """Matches waiting requests and decides whether their known need fits beside what runs.

    A request that waits holds no references: it is matched here, and `withdraw` undoes it when
    its first chunk finds no place after all.
    """

    cache: PrefixCache
    in_flight: InFlight[Request]
    page_size: int

    def follows(self, request: Request) -> bool:
        """Whether the next page of the request is being computed by a running one, which it
        need not compute itself.

        While that one goes on towards the last page they share nothing is compared again, so a
        crowd of followers costs a step next to nothing.
        """
        if request.is_scoring:
            return False
        leader = request.leader
        if (
            leader is None
            or leader.table is None
            or leader.num_computed_tokens >= request.leads_until
        ):
            matched = self.cache.peek(request.namespace, request.token_ids)
            leader = self.in_flight.leader(request.namespace, request.token_ids, matched)
            request.leader = leader
            request.leads_until = self._shared_whole_pages(request, leader) if leader else 0
        return leader is not None

    def take(self, request: Request, limit: int | None = None) -> None:
        """Match at most `limit` tokens: the request holds their pages. Of a full match the last
        token is recomputed, for its logits, and so is all from the first position that is to be
        scored."""
        if request.is_scoring:
            limit = request.num_scored if limit is None else min(limit, request.num_scored)
        match = self.cache.match(request.namespace, request.token_ids, limit)
        request.table = match.table
        request.num_computed_tokens = min(match.num_cached_tokens, request.num_tokens - 1)
        request.prefill_end = request.num_tokens
        self.in_flight.register(request, request.namespace, request.token_ids, match.table)

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

    def fits(self, request: Request, running: list[Request]) -> bool:
        """Whether all known tokens of a taken request fit into free and evictable pages, after
        the known needs of those that run, and with a page to grow for each of them.

        Asking for the whole need, not for the next chunk, is what keeps a preempted long prompt
        from being readmitted, filling the pool and being preempted again, for ever.
        """
        if not running:
            return True
        assert request.table is not None
        counts = self.cache.stats()
        need = sum(map(self._missing_pages, running)) + len(running)
        copied = request.table.num_tokens % self.page_size > 0
        need += self._missing_pages(request) + copied
        return need <= counts.free + counts.cached

    def _missing_pages(self, request: Request) -> int:
        assert request.table is not None
        return max(0, -(-request.num_tokens // self.page_size) - len(request.table.pages))

    def _shared_whole_pages(self, one: Request, other: Request) -> int:
        """Tokens from the start that two requests have in common, in whole pages."""
        length = min(one.num_tokens, other.num_tokens)
        differs = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
        common = int(differs[0]) if differs.size else length
        return common // self.page_size * self.page_size

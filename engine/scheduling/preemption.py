"""Whose pages go when pages run out, and how it is bounded."""

from collections.abc import Iterable

from engine.scheduling.request import Request
from prefix_cache.cache import PrefixCache


class Preemption:
    """Chooses victims and counts what is reserved; pages are given up by the scheduler.

    No livelock: each request gives way three times at most, and a settled one never waits for a
    page once it runs. Nothing is lost but pages: the victim's computed tokens are published, and
    it goes on from those that are still cached when it comes back.
    """

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size

    def victim(self, request: Request, running: Iterable[Request]) -> Request | None:
        """Who gives up pages for `request`: of the least urgent, those without credit first, who
        would have the least to compute again; it may be `request` itself. None if nobody can, or
        nobody else runs.
        """
        others = [other for other in running if other is not request]
        if not others:
            return None
        candidates = [other for other in (*others, request) if self._may_give(other, request)]
        return min(candidates, key=self._loss, default=None)

    def missing_pages(self, request: Request) -> int:
        """Pages a running request needs for its known tokens; for all it may ever compute, and a
        copy of a shared page, if it is settled."""
        assert request.table is not None
        num_tokens = request.num_tokens
        if request.is_settled:
            num_tokens = max(num_tokens, request.num_prompt_tokens + request.max_new_tokens - 1)
        missing = -(-num_tokens // self._page_size) - request.table.num_pages
        return max(0, missing) + request.is_settled

    def reserved_pages(self, request: Request, running: Iterable[Request]) -> int:
        """Pages that are kept for others than `request`."""
        return sum(
            self.missing_pages(other)
            for other in running
            if other.is_settled and other is not request
        )

    def _may_give(self, other: Request, request: Request) -> bool:
        if other.paused and other is not request:
            return True
        return not other.is_settled and other.urgency >= request.urgency

    def _loss(self, request: Request) -> tuple[bool, int, int, int]:
        assert request.table is not None
        pages = self._cache.count_exclusive(request.table)
        lost = min(pages * self._page_size, request.num_computed_tokens)
        return not request.paused, -request.urgency, lost if pages else 1 << 62, -request.arrival

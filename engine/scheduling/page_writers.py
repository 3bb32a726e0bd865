"""Who computed what stands in a page, so that a cache hit can name its donor."""

from collections.abc import Sequence

from prefix_cache.page_pool import PageIds


class PageWriters:
    """The request that last wrote into each page of the pool."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._writers = [""] * num_pages
        self._page_size = page_size

    def note(self, pages: Sequence[int] | PageIds, start: int, end: int, request_id: str) -> None:
        """The request computed tokens [start, end) into its `pages`."""
        for index in range(start // self._page_size, -(-end // self._page_size)):
            self._writers[pages[index]] = request_id

    def copy(self, src: int, dst: int) -> None:
        """Page dst is about to hold what src holds."""
        self._writers[dst] = self._writers[src]

    def donor(self, pages: Sequence[int], num_tokens: int) -> str:
        """Who computed the last of the first `num_tokens` tokens in `pages`; "" for none."""
        return self._writers[pages[(num_tokens - 1) // self._page_size]] if num_tokens else ""

"""The pages of one live request."""

from collections.abc import Iterable

import numpy as np

from prefix_cache.key import Namespace
from prefix_cache.page_pool import PageIds
from prefix_cache.radix_tree import Use


class PageTable:
    """Owned by a request, changed only by the cache.

    page_ids: the page of each page index; slots 0..num_tokens-1 hold valid K/V (matched, or
    computed and published), slots num_tokens..num_writable-1 may be written. copy_source: the page
    that a copy planned by `extend` reads, referenced until the step is published; None without
    one. origin: the use it went on from; None if it began anew. published: whether anything was.
    """

    __slots__ = (
        "_ids",
        "copy_source",
        "namespace",
        "num_pages",
        "num_tokens",
        "num_writable",
        "origin",
        "published",
    )

    def __init__(
        self,
        namespace: Namespace,
        runs: Iterable[PageIds],
        num_tokens: int,
        origin: Use | None = None,
        capacity: int = 0,
    ) -> None:
        """`runs` are copied; `capacity` is how many pages it may come to need."""
        self.namespace = namespace
        self._ids = np.empty(capacity, dtype=np.int64)
        self.num_pages = 0
        for run in runs:
            self.append(run)
        self.num_tokens = num_tokens
        self.num_writable = num_tokens
        self.copy_source: int | None = None
        self.origin = origin
        self.published = False

    @property
    def page_ids(self) -> PageIds:
        """int64 [num_pages], a view, valid until the table grows."""
        return self._ids[: self.num_pages]

    @property
    def pages(self) -> list[int]:
        """The page ids as a list."""
        ids: list[int] = self.page_ids.tolist()
        return ids

    @property
    def is_append_owner(self) -> bool:
        """Whether slot num_tokens lies in a page of this table that it may write."""
        return self.num_writable > self.num_tokens

    def append(self, pages: PageIds) -> None:
        """Pages for the next page indices."""
        end = self.num_pages + len(pages)
        if end > len(self._ids):
            larger = np.empty(max(end, 2 * self.num_pages), dtype=np.int64)
            larger[: self.num_pages] = self.page_ids
            self._ids = larger
        self._ids[self.num_pages : end] = pages
        self.num_pages = end

    def close(self) -> None:
        """The request is gone, and holds nothing."""
        self._ids = self._ids[:0]
        self.num_pages = 0
        self.num_tokens = 0
        self.num_writable = -1

"""Which cached page goes first: leaves are cut page by page, from their end, best victim first."""

import heapq
from collections.abc import Callable

import numpy as np

from prefix_cache.page_pool import PagePool
from prefix_cache.radix_tree import Node, RadixForest

Order = Callable[[Node], int]
"""A leaf's rank, the lowest evicted first. It may change at any time, but only to rise."""


def least_recently_used(node: Node) -> int:
    """Rank by the last release of a table that ended in the node, or in one cut from below it."""
    return node.last_used


class Evictor:
    """A heap of the leaves whose last page nothing references, corrected when they reach its top.

    Every such leaf must be offered when it comes to be one; after that using it costs nothing. A
    cached page is never above a referenced one, so all cached pages can be evicted.
    """

    def __init__(
        self, pool: PagePool, forest: RadixForest, order: Order = least_recently_used
    ) -> None:
        self._pool = pool
        self._forest = forest
        self._order = order
        self._heap: list[tuple[int, int, Node]] = []
        self._num_offered = 0

    def is_candidate(self, node: Node) -> bool:
        """Whether the node is a leaf whose last page nothing references."""
        return node.num_pages > 0 and not node.children and not self._pool.refs[node.pages[-1]]

    def offer(self, node: Node) -> None:
        """Queue the node if it is a candidate and not queued."""
        if not node.queued and self.is_candidate(node):
            node.queued = True
            self._push(node)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` cached pages; how many. O(log leaves) for each leaf cut."""
        num_evicted = 0
        while num_evicted < num_pages and self._heap:
            rank, _, leaf = heapq.heappop(self._heap)
            if self._order(leaf) > rank:
                self._push(leaf)
                continue
            leaf.queued = False
            if self.is_candidate(leaf):
                num_evicted += self._cut(leaf, num_pages - num_evicted)
        return num_evicted

    def _cut(self, leaf: Node, limit: int) -> int:
        last_pages = leaf.pages[-limit:]
        held = np.flatnonzero(self._pool.refs[last_pages])
        count = len(last_pages) - (int(held[-1]) + 1 if len(held) else 0)
        parent = leaf.parent
        self._pool.delist(self._forest.cut(leaf, count))
        if leaf.num_pages:
            self.offer(leaf)
        elif parent is not None:
            self.offer(parent)
        return count

    def _push(self, node: Node) -> None:
        self._num_offered += 1
        heapq.heappush(self._heap, (self._order(node), self._num_offered, node))

"""Which cached page goes first: leaves are cut page by page, from their end, best victim first.

A policy sorts what requests leave behind into kinds and says what a page of a kind and age is
worth. Within a kind the page unused for longest goes first, so a victim costs a look at the head
of each kind's queue.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from prefix_cache.evicted import EvictedPrefixes
from prefix_cache.page_pool import PagePool
from prefix_cache.radix_tree import Node, RadixForest
from prefix_cache.reuse import ReuseModel


class EvictionPolicy(Protocol):
    """What cached pages are worth. Ages are counted in requests that ended (ticks)."""

    @property
    def num_kinds(self) -> int:
        """Kinds are 0..num_kinds-1."""

    def kind_of(self, turns: int, num_new_pages: int) -> int:
        """The kind of what a request leaves that was the `turns`-th to go on from what it found
        (0: it began anew), and computed so many pages."""

    def kind_at_end(self, kind: int) -> int:
        """The kind of the page in which such a request ended, until that is cut."""

    def ended(self, kind: int) -> None:
        """A request left pages of the kind."""

    def reused(self, kind: int, age: int, *, whole: bool) -> None:
        """A request went on from pages of the kind, `whole` to their last, whether they were
        still there or had been evicted."""

    def worth(self, kind: int, age: int) -> float:
        """Of a page; the least is evicted."""

    def refresh(self) -> None:
        """Called before pages are chosen."""


class LeastRecentlyUsed:
    """One kind, and age alone counts: the baseline."""

    num_kinds = 1

    def kind_of(self, turns: int, num_new_pages: int) -> int:
        """Always 0."""
        return 0

    def kind_at_end(self, kind: int) -> int:
        """Always 0."""
        return 0

    def ended(self, kind: int) -> None:
        """Nothing is learned."""

    def reused(self, kind: int, age: int, *, whole: bool) -> None:
        """Nothing is learned."""

    def worth(self, kind: int, age: int) -> float:
        """Less with every tick."""
        return -age

    def refresh(self) -> None:
        """Nothing to do."""


_MAX_TURNS: Final = 5
_SIZES: Final = (1536, 4096, 8192)
"""Tokens that a turn added, as bounds between kinds."""


class ExpectedReuse:
    """Worth of a page: how often it will be used again per tick, as learned from this server's
    own requests (`reuse.py`).

    Kinds are how many turns a session has had, and how much its last turn added: agents in the
    middle of a task come back, one-off prompts do not. What computing a page again costs is not
    weighed by its depth: that was tried, and saved less computing than treating all alike, as a
    deep page is of use only while all above it stay (`python -m prefix_cache.bench hit-rate`).
    """

    num_kinds = 2 * (_MAX_TURNS + 1) * (len(_SIZES) + 1)

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._model = ReuseModel(self.num_kinds // 2)

    def kind_of(self, turns: int, num_new_pages: int) -> int:
        """Even."""
        size = bisect_right(_SIZES, num_new_pages * self._page_size)
        return 2 * (min(turns, _MAX_TURNS) * (len(_SIZES) + 1) + size)

    def kind_at_end(self, kind: int) -> int:
        """The odd one after it."""
        return kind + 1

    def ended(self, kind: int) -> None:
        """A tick for the model."""
        self._model.started(kind // 2)

    def reused(self, kind: int, age: int, *, whole: bool) -> None:
        """Whoever reaches the page at the end reaches all before it."""
        self._model.reused(kind, age)
        if whole:
            self._model.reused(kind + 1, age)

    def worth(self, kind: int, age: int) -> float:
        """Reuses per tick."""
        return self._model.rate(kind, age)

    def refresh(self) -> None:
        """Take in what was learned."""
        self._model.refresh()


class Evictor:
    """Per kind a heap of the leaves whose last page nothing holds, corrected at its top.

    Every such leaf must be offered when it comes to be one; after that using it costs nothing. A
    cached page is never above a referenced or pinned one, so all cached pages can be evicted.
    Each of `on_cut` is told of pages before they go: the forest, the leaf, and how many of it stay.
    """

    def __init__(
        self,
        pool: PagePool,
        forest: RadixForest,
        policy: EvictionPolicy,
        evicted: EvictedPrefixes,
    ) -> None:
        self.tick = 0
        self._pool = pool
        self._forest = forest
        self._policy = policy
        self._evicted = evicted
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in range(policy.num_kinds)]
        self._num_offered = 0
        self.on_cut: list[Callable[[RadixForest, Node, int], None]] = []

    def is_candidate(self, node: Node) -> bool:
        """Whether the node is a leaf whose last page nothing holds."""
        if node.num_held == node.num_pages or node.children:
            return False  # a root has no pages
        last = node.pages[-1]
        return not self._pool.refs[last] and not self._pool.pins[last]

    def offer(self, node: Node) -> None:
        """Queue the node if it is a candidate and not queued."""
        if node.queued < 0 and self.is_candidate(node):
            self._push(node)

    def begin_anew(self, nodes: Iterable[Node]) -> None:
        """Forget all queues, and queue what may be evicted of these nodes."""
        self._heaps = [[] for _ in self._heaps]
        for node in nodes:
            node.queued = -1
            self.offer(node)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` cached pages; how many."""
        self._policy.refresh()
        num_evicted = 0
        while num_evicted < num_pages and (leaf := self._victim()) is not None:
            num_evicted += self._cut(leaf, num_pages - num_evicted)
        return num_evicted

    def _kind(self, node: Node) -> int:
        use = node.use
        return self._policy.kind_at_end(use.kind) if use.whole else use.kind

    def _victim(self) -> Node | None:
        """Take the leaf worth least from its queue."""
        for kind in range(len(self._heaps)):
            self._correct(kind)
        best: Node | None = None
        least = math.inf
        for kind, heap in enumerate(self._heaps):
            if not heap:
                continue
            worth = self._policy.worth(kind, self.tick - heap[0][0])
            if worth < least:
                best, least = heap[0][2], worth
        if best is not None:
            heapq.heappop(self._heaps[best.queued])
            best.queued = -1
        return best

    def _correct(self, kind: int) -> None:
        """Leave a candidate of the kind at the top of its heap; what was used meanwhile moves to
        where it belongs now, and is in order there."""
        heap = self._heaps[kind]
        while heap:
            rank, _, leaf = heap[0]
            if leaf.use.tick == rank and self._kind(leaf) == kind and self.is_candidate(leaf):
                return
            heapq.heappop(heap)
            leaf.queued = -1
            self.offer(leaf)

    def _cut(self, leaf: Node, limit: int) -> int:
        """Up to `limit` pages off a leaf's end; the page a request ended in goes alone, as what
        stands before it may be worth more."""
        if leaf.use.whole and self._kind(leaf) != leaf.use.kind:
            limit = 1
        pages = leaf.pages[max(leaf.num_held, leaf.num_pages - limit) :]
        held = self._pool.is_held(pages).nonzero()[0]
        count = len(pages) - (int(held[-1]) + 1 if len(held) else 0)
        kept = leaf.num_pages - count
        self._evicted.note(self._forest, leaf, kept)
        for tell in self.on_cut:
            tell(self._forest, leaf, kept)
        parent = leaf.parent
        self._pool.delist(self._forest.cut(leaf, count))
        if leaf.num_pages:
            self.offer(leaf)
        elif parent is not None:
            self.offer(parent)
        return count

    def _push(self, node: Node) -> None:
        self._num_offered += 1
        node.queued = self._kind(node)
        heapq.heappush(self._heaps[node.queued], (node.use.tick, self._num_offered, node))

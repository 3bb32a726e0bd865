"""A look at all trees that can be interrupted: the largest subtrees, and what the rest adds up to.

The trees may change between two pieces of a survey. Nodes that have gone by its end are left out;
sizes are those of when each subtree was passed.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np

from prefix_cache.page_pool import PagePool
from prefix_cache.radix_tree import Node, RadixForest, Root
from prefix_cache.tiers import DiskTier

MOST_DISK: Final = 4096
"""Pages on disk that one survey counts, which takes about a millisecond; the largest subtrees'
come first."""
MOST_GONE: Final = 16
"""Namespaces that it tells of although nothing of them is left on the device."""


@dataclass(frozen=True, slots=True, eq=False)
class SurveyedNode:
    """A node (or root), the index of its closest ancestor among the surveyed (-1 for roots), and
    of what is in and below it: pages, nodes, and the tick of the last use. `num_disk` pages of the
    second tier go on from it itself."""

    node: Node
    parent: int
    subtree_pages: int
    subtree_nodes: int
    last_tick: int
    num_disk: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """The largest subtrees, ancestors first, of `num_nodes` nodes with `num_pages` pages."""

    nodes: tuple[SurveyedNode, ...]
    num_nodes: int
    num_pages: int


@dataclass(slots=True, eq=False)
class _Visit:
    """A node whose children are being visited, and what they add up to so far."""

    node: Node
    order: int
    children: Iterator[Node]
    pages: int
    nodes: int
    tick: int


class Surveyor:
    """Surveys one forest again and again, at most so many nodes at a call.

    Memory: the path it is on, and the nodes it keeps. A subtree is never larger than its
    parent's, so the largest ones always come with all their ancestors.
    """

    def __init__(
        self, forest: RadixForest, max_kept: int, tier: Callable[[], DiskTier | None] = lambda: None
    ) -> None:
        """`tier` gives the second one, where there is one by now."""
        self._tier = tier
        self._forest = forest
        self._max_kept = max_kept
        self._running: Iterator[Survey | None] | None = None

    def advance(self, max_nodes: int) -> Survey | None:
        """Go on by so many nodes; the survey, where that completed it (the next call begins
        anew)."""
        if self._running is None:
            self._running = self._pieces()
        for _, survey in zip(range(max_nodes), self._running, strict=False):
            if survey is not None:
                self._running = None
                return survey
        return None

    def _pieces(self) -> Iterator[Survey | None]:
        """None after each node, then the survey."""
        kept: list[tuple[int, int, _Visit]] = []
        num_nodes = num_pages = order = 0
        for root in list(self._forest.roots.values()):
            path = [_visit(root, order)]
            while path:
                visit = path[-1]
                child = next(visit.children, None)
                if child is not None:
                    order += 1
                    path.append(_visit(child, order))
                    continue
                path.pop()
                if path:
                    above = path[-1]
                    above.pages += visit.pages
                    above.nodes += visit.nodes
                    above.tick = max(above.tick, visit.tick)
                else:
                    num_nodes += visit.nodes
                    num_pages += visit.pages
                # Visited earlier counts as larger: an ancestor wins over its only child.
                entry = (visit.pages, -visit.order, visit)
                if len(kept) < self._max_kept:
                    heapq.heappush(kept, entry)
                else:
                    heapq.heappushpop(kept, entry)
                yield None
            order += 1
        nodes = _linked([visit for _, _, visit in kept])
        tier = self._tier()
        if tier is not None:
            nodes = _with_disk(self._forest, nodes, tier)
        yield Survey(nodes, num_nodes, num_pages)


def _visit(node: Node, order: int) -> _Visit:
    is_root = isinstance(node, Root)
    children = iter(node.children.copy())
    return _Visit(node, order, children, node.num_pages, int(not is_root), node.use.tick)


def _with_disk(
    forest: RadixForest, nodes: tuple[SurveyedNode, ...], tier: DiskTier
) -> tuple[SurveyedNode, ...]:
    """With what is on disk below each, and the roots of which all that is left is there."""
    left = MOST_DISK
    found: list[SurveyedNode] = []
    for seen in nodes:
        name = forest.namespace_of(seen.node)
        found.append(replace(seen, num_disk=tier.count_below(name, seen.node.pages, left)))
        left -= found[-1].num_disk
    gone = (name for name in tier.namespaces() if name not in forest.roots)
    for name in islice(gone, MOST_GONE):
        root = Root(name)
        num_disk = tier.count_below(name, root.pages, left)
        found.append(SurveyedNode(root, -1, 0, 0, 0, num_disk))
        left -= num_disk
    return tuple(found)


def _linked(visits: list[_Visit]) -> tuple[SurveyedNode, ...]:
    """In the order of the visit, without what has left the tree since."""
    found: list[SurveyedNode] = []
    index: dict[int, int] = {}
    for visit in sorted(visits, key=lambda visit: visit.order):
        node = visit.node
        if not (node.num_pages if node.parent is not None else node.children):
            continue
        above = node.parent
        while above is not None and id(above) not in index:
            above = above.parent  # a node that a split has put between
        if (above is None) != (node.parent is None):
            continue
        index[id(node)] = len(found)
        parent = -1 if above is None else index[id(above)]
        found.append(SurveyedNode(node, parent, visit.pages, visit.nodes, visit.tick))
    return tuple(found)


def count_held(pool: PagePool, node: Node) -> tuple[int, int]:
    """How many of a node's pages live tables read, and how many of the others leases hold."""
    referenced = pool.refs[node.pages] > 0
    referenced[: node.num_held] = True
    leased = (pool.pins[node.pages] > 0) & ~referenced
    return int(np.count_nonzero(referenced)), int(np.count_nonzero(leased))

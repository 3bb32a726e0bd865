"""After an audit that found something wrong: what cannot be trusted goes, the rest is recounted."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from prefix_cache.audit import all_nodes, bad_subtrees
from prefix_cache.eviction import Evictor
from prefix_cache.lease import LeaseBook
from prefix_cache.page_pool import PageIds, PagePool
from prefix_cache.radix_tree import Node, RadixForest

_NO_PAGES: Final = np.empty(0, dtype=np.int64)
_NO_SLOTS: Final = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Repair:
    """What an audit found wrong, and how many pages were given up for it."""

    differences: tuple[str, ...]
    num_pages: int


def drop_bad_subtrees(
    pool: PagePool, forest: RadixForest, evictor: Evictor, leases: LeaseBook
) -> int:
    """Take what is wrong out of the trees, with the leases on it, and make all books agree with
    what is left; how many more pages are free. No table lives."""
    before = len(pool.free_ids)
    for top in bad_subtrees(pool, forest, evictor):
        forest.detach(top)
    for name in [name for name, root in forest.roots.items() if not root.children]:
        del forest.roots[name]
    nodes = all_nodes(forest)
    forest.relist(nodes)
    for node in [*forest.roots.values(), *nodes]:
        node.ends, node.num_held, node.num_held_children = {}, 0, 0
    leases.begin_anew([lease for lease in leases if _is_path(lease.pages, forest)])
    pool.recount(
        np.concatenate([_NO_PAGES, *(node.pages for node in nodes)]),
        np.concatenate([_NO_SLOTS, *(_slots(node, forest.page_size) for node in nodes)]),
        np.concatenate([_NO_PAGES, *(lease.pages for lease in leases)]),
    )
    evictor.begin_anew(nodes)
    return max(0, len(pool.free_ids) - before)


def _is_path(pages: PageIds, forest: RadixForest) -> bool:
    """Whether these pages are a prefix in the trees, from its root."""
    parts: list[PageIds] = []
    node = forest.node_of(int(pages[-1]))
    while node is not None:
        parts.append(node.pages)
        node = node.parent
    path = np.concatenate([_NO_PAGES, *parts[::-1]])
    return bool(np.array_equal(path[: len(pages)], pages))


def _slots(node: Node, page_size: int) -> NDArray[np.int32]:
    """How many valid slots each page of a node has."""
    slots = np.full(node.num_pages, page_size, dtype=np.int32)
    slots[-1] = node.num_tokens - (node.num_pages - 1) * page_size
    return slots

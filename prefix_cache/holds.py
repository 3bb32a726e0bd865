"""Which pages of the trees live tables hold, counted where each table ends instead of page by page.

What a table holds of a tree is a path's first pages, all full. So a node needs to know only how
many tables end behind which of its pages, and in how many of its children any are held: a table
of thousands of pages costs as much as one of few.
"""

from dataclasses import dataclass

import numpy as np

from prefix_cache.page_pool import PageIds, PagePool
from prefix_cache.radix_tree import Node, RadixForest


@dataclass(frozen=True, slots=True)
class Holds:
    """Counts tables in the trees' nodes, and keeps the pool's counts of states with it."""

    pool: PagePool
    forest: RadixForest

    def add(self, path: PageIds) -> None:
        """One more table holds this path, from its root on. O(nodes that nobody held)."""
        node, depth = self._place(path)
        node.ends[depth] = node.ends.get(depth, 0) + 1
        while depth > node.num_held:
            was_held = node.num_held > 0
            self.pool.cover(node.pages[node.num_held : depth])
            node.num_held = depth
            above = node.parent
            if was_held or above is None:
                return
            above.num_held_children += 1
            node, depth = above, above.num_pages

    def drop(self, path: PageIds) -> None:
        """One table less. O(nodes that nobody holds then, and ends in the last of them)."""
        node, depth = self._place(path)
        node.ends[depth] -= 1
        if not node.ends[depth]:
            del node.ends[depth]
        while not node.num_held_children and (kept := max(node.ends, default=0)) < node.num_held:
            self.pool.uncover(node.pages[kept : node.num_held])
            node.num_held = kept
            above = node.parent
            if kept or above is None:
                return
            above.num_held_children -= 1
            node = above

    def exclusive(self, path: PageIds) -> PageIds:
        """The pages that nobody would hold any more without one of the tables that hold it."""
        node, depth = self._place(path)
        others = [end for end, count in node.ends.items() if end < depth or count > 1]
        found: list[PageIds] = []
        num_held_children = node.num_held_children
        while not num_held_children and (kept := max(others, default=0)) < node.num_held:
            found.append(node.pages[kept : node.num_held])
            above = node.parent
            if kept or above is None:
                break
            node, others = above, list(above.ends)
            num_held_children = above.num_held_children - 1
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _place(self, path: PageIds) -> tuple[Node, int]:
        """The node in which the path ends, and how many of its pages are in it."""
        node = self.forest.node_of(int(path[-1]))
        assert node is not None
        return node, len(path) - node.first_page

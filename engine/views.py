"""What somebody who watches an engine sees: its requests and the radix tree, both bounded.

Times are as in `engine.types`. None of it is kept anywhere; an engine nobody watches makes none.
"""

from typing import Final

import msgspec

from engine.stats import EngineStats
from engine.types import Phase

MAX_LANES: Final = 128
"""Requests of one view: those that run, then those that wait."""
MAX_LANE_PHASES: Final = 64
MAX_TREE_NODES: Final = 256
MAX_NODE_TOKENS: Final = 1024


class LaneView(msgspec.Struct, frozen=True, array_like=True):
    """A live request. `status` is waiting, running, paused (its reader is slow) or preempted;
    `phases` are the last that have ended, MAX_LANE_PHASES at most; `since_ns` is when the present
    one began."""

    id: str
    tenant: str
    status: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    since_ns: int
    phases: tuple[Phase, ...] = ()


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of tokens in the radix tree, or (`page` -1) the root of a namespace's tree.

    `page` is its first page's id and names it; `parent` is an index into the view's nodes, -1 for
    roots. `start` is the position of its first token. Of its `num_pages`, `num_referenced` are read
    by running requests, and `num_leased` of the others held by leases. `subtree_pages` and
    `subtree_nodes` count what hangs below it too, and itself; `age` is how many requests have ended
    since the last that ended in it or below. `label` says whose a root is. `num_disk` pages of the
    second tier go on from it itself.
    """

    page: int
    parent: int
    start: int
    num_tokens: int
    num_pages: int
    num_referenced: int
    num_leased: int
    subtree_pages: int
    subtree_nodes: int
    age: int
    label: str = ""
    num_disk: int = 0


class TreeView(msgspec.Struct, frozen=True, array_like=True):
    """The largest subtrees, each after its parent, MAX_TREE_NODES at most, of all there are.

    Large trees are surveyed piece by piece over many views, so that no step waits for it: what
    changed meanwhile may be counted as it was. `time_ns` is when the survey was complete.
    """

    nodes: tuple[TreeNode, ...]
    num_nodes: int
    num_pages: int
    time_ns: int


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at `time_ns`. `tree` is None where it was not asked for, or is not surveyed yet."""

    time_ns: int
    stats: EngineStats
    lanes: tuple[LaneView, ...]
    tree: TreeView | None = None


class NodeView(msgspec.Struct, frozen=True, array_like=True):
    """A node as it is now, with its first MAX_NODE_TOKENS tokens, packed."""

    tenant: str
    salt: str
    start: int
    num_tokens: int
    num_pages: int
    num_referenced: int
    num_leased: int
    num_children: int
    age: int
    token_ids: bytes

"""What a watcher sees of scheduler and cache; made when asked, within bounds."""

from collections.abc import Callable
from itertools import chain, islice
from typing import Final

from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from engine.stats import EngineStats
from engine.types import pack_tokens
from engine.views import (
    MAX_LANE_PHASES,
    MAX_LANES,
    MAX_NODE_TOKENS,
    MAX_TREE_NODES,
    EngineView,
    LaneView,
    NodeView,
    TreeNode,
    TreeView,
)
from prefix_cache.cache import PrefixCache
from prefix_cache.radix_tree import Root
from prefix_cache.survey import SurveyedNode

_NODES_BUSY: Final = 500
"""Nodes surveyed at a call while something runs: about a millisecond."""
_NODES_IDLE: Final = 10_000


class Lookout:
    """Used on the engine's thread; changes nothing."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        page_size: int,
        clock_ns: Callable[[], int],
    ) -> None:
        self._page_size = page_size
        self._cache = cache
        self._scheduler = scheduler
        self._clock_ns = clock_ns
        self._surveyor = cache.surveyor(MAX_TREE_NODES)
        self._tree: TreeView | None = None

    def view(self, stats: EngineStats, *, tree: bool) -> EngineView:
        """The engine now; the tree as the last complete survey found it."""
        if tree:
            self._survey()
        scheduler = self._scheduler
        live = islice(chain(scheduler.running, scheduler.waiting), MAX_LANES)
        lanes = tuple(map(_lane, live))
        shown = self._tree if tree else None
        return EngineView(time_ns=self._clock_ns(), stats=stats, lanes=lanes, tree=shown)

    def read_node(self, page: int) -> NodeView | None:
        """The node that lists a page, with the start of its text."""
        found = self._cache.find_node(page)
        if found is None:
            return None
        namespace, node = found
        num_referenced, num_leased = self._cache.count_held(node)
        return NodeView(
            namespace.tenant,
            namespace.salt,
            node.first_page * self._page_size,
            node.num_tokens,
            node.num_pages,
            num_referenced,
            num_leased,
            len(node.children),
            self._cache.tick - node.use.tick,
            pack_tokens(node.tokens[:MAX_NODE_TOKENS]),
        )

    def _survey(self) -> None:
        survey = self._surveyor.advance(_NODES_BUSY if self._scheduler.running else _NODES_IDLE)
        if survey is not None:
            nodes = tuple(map(self._node, survey.nodes))
            self._tree = TreeView(nodes, survey.num_nodes, survey.num_pages, self._clock_ns())

    def _node(self, seen: SurveyedNode) -> TreeNode:
        node = seen.node
        num_referenced, num_leased = self._cache.count_held(node)
        is_root = isinstance(node, Root)
        return TreeNode(
            -1 if is_root else int(node.pages[0]),
            seen.parent,
            node.first_page * self._page_size,
            node.num_tokens,
            node.num_pages,
            num_referenced,
            num_leased,
            seen.subtree_pages,
            seen.subtree_nodes,
            self._cache.tick - seen.last_tick,
            _label(node) if isinstance(node, Root) else "",
            seen.num_disk,
        )


def _label(root: Root) -> str:
    namespace = root.namespace
    return f"{namespace.tenant} / {namespace.salt}" if namespace.salt else namespace.tenant


def _lane(request: Request) -> LaneView:
    status = "waiting"
    if request.status is RequestStatus.RUNNING:
        status = "paused" if request.paused else "running"
    elif request.status is RequestStatus.PREEMPTED:
        status = "preempted"
    return LaneView(
        request.id,
        request.tenant,
        status,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        request.num_computed_tokens,
        request.num_output_tokens,
        request.phase_start_ns,
        request.last_phases(MAX_LANE_PHASES),
    )

"""What a request goes on from, and what it leaves behind for the eviction policy."""

from dataclasses import replace
from typing import Final

from prefix_cache.evicted import Eviction
from prefix_cache.eviction import EvictionPolicy
from prefix_cache.page_table import PageTable
from prefix_cache.radix_tree import Match, Use

_MOST_TURNS: Final = 1000


def origin_of(found: Match, eviction: Eviction | None, page_size: int) -> Use | None:
    """The use that a match goes on from: that of the leaf it covers at least half of, or of what
    stood behind the match before it was evicted."""
    node = found.node
    is_leaf = node is not None and not node.children and node.use.tick > 0
    if node is None or not is_leaf or 2 * found.depth < node.num_tokens:
        return None if eviction is None else eviction.use
    if node.use.whole and -(-found.depth // page_size) < node.num_pages:
        return replace(node.use, whole=False)
    return node.use


def use_of(table: PageTable, former: Use, num_full: int, tick: int, policy: EvictionPolicy) -> Use:
    """The use that a table with so many full pages leaves at a tick, where `former` stood; the
    policy learns from those that published."""
    origin = table.origin
    if not table.published:
        return replace(former, tick=tick)
    turns = 0 if origin is None else min(origin.turns + 1, _MOST_TURNS)
    kind = policy.kind_of(turns, num_full - (origin.num_pages if origin else 0))
    policy.ended(kind)
    if origin is not None:
        policy.reused(origin.kind, tick - origin.tick, whole=origin.whole)
    return Use(tick, turns, kind, num_full)

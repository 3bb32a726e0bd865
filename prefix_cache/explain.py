"""Why a prompt hit as far as it did, and not farther."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from prefix_cache.key import Namespace
from prefix_cache.radix_tree import Match, RadixForest, TokenIds

WINDOW: Final = 8
"""Tokens of the stored side that an explanation shows from the first difference on."""


class MissReason(StrEnum):
    """What ended a match. HISTORY_REWRITTEN and DISABLED are for the caller to say, who knows
    what the prompt's parts are and whether it may use the cache at all."""

    COLD = "cold"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    NAMESPACE = "namespace"
    TOO_SHORT = "too_short"
    HISTORY_REWRITTEN = "history_rewritten"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """`reason` is None where everything ever stored of the prompt was found: all of it, or all up
    to the end of what was computed, after which it is new.

    num_matched: tokens found, and so the position of the first that was not. stored: of what the
    same namespace has there instead, the first tokens; empty where it has nothing. evicted_ago_s:
    for EVICTED.
    """

    reason: MissReason | None
    num_matched: int
    stored: TokenIds
    evicted_ago_s: float = 0.0


def explain(
    forest: RadixForest,
    namespace: Namespace,
    tokens: TokenIds,
    found: Match,
    evicted_ago_s: float | None,
) -> Explanation:
    """The explanation of a match; of other namespaces than `namespace` no token is told, and only
    of the tenant's own one without a salt that it has more. O(tokens) at most."""
    position = found.num_tokens
    nothing = np.empty(0, dtype=np.int32)
    if position >= len(tokens) - 1:  # the last token is computed in any case, for its logits
        return Explanation(None, position, nothing)
    if evicted_ago_s is not None:
        return Explanation(MissReason.EVICTED, position, nothing, evicted_ago_s)
    if _has_more_unsalted(forest, namespace, tokens, position):
        return Explanation(MissReason.NAMESPACE, position, nothing)
    if not position:
        short = len(tokens) < forest.page_size
        return Explanation(MissReason.TOO_SHORT if short else MissReason.COLD, 0, nothing)
    stored = forest.continuation(found)[:WINDOW].copy()
    return Explanation(MissReason.DIVERGED if len(stored) else None, position, stored)


def _has_more_unsalted(
    forest: RadixForest, namespace: Namespace, tokens: TokenIds, position: int
) -> bool:
    if not namespace.salt:
        return False
    own = replace(namespace, salt="")
    return forest.match(own, tokens).num_tokens >= position + forest.page_size

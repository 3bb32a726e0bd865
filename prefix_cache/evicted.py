"""What was evicted, and when: names of prefixes, kept beyond their pages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from prefix_cache.key import Namespace
from prefix_cache.radix_tree import Node, RadixForest, TokenIds, Use

_PER_PAGE: Final = 4
_LEAST: Final = 256
NAMED_BY: Final = 512
"""Tokens at the end of a prefix that name it."""
_ENTRY: Final = np.dtype(
    [
        ("name", np.uint64),
        ("tick", np.int64),
        ("turns", np.int32),
        ("kind", np.int32),
        ("num_pages", np.int32),
        ("evicted_s", np.float64),
    ]
)
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Eviction:
    """A prefix that is gone: its last use, and the clock's time at which it was evicted."""

    use: Use
    evicted_s: float


class EvictedPrefixes:
    """A table of fixed size by the hash of a prefix; a new entry may push out an old one.

    It explains and it teaches the policy, nothing else: an entry never makes a hit, so a name that
    two prefixes share costs a wrong sentence at worst. A name is made of a prefix's length and its
    last tokens, so long prompts cost no more than short ones.
    """

    def __init__(self, num_pages: int, page_size: int, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        size = 1 << max(_LEAST, _PER_PAGE * num_pages - 1).bit_length()
        self._page_size = page_size
        self._clock = clock
        self._slots = size - 1
        self._entries = np.zeros(size, dtype=_ENTRY)

    def note(self, forest: RadixForest, leaf: Node, num_kept: int) -> None:
        """The pages of the leaf behind the first `num_kept` are about to be cut."""
        if not leaf.use.tick:
            return
        count = min(leaf.num_tokens, (num_kept + 1) * self._page_size)
        tokens = forest.path_tokens(leaf, count, NAMED_BY)
        length = leaf.first_page * self._page_size + count
        name = prefix_hash(forest.namespace_of(leaf), tokens, length)
        use = leaf.use
        entry = (name, use.tick, use.turns, use.kind, use.num_pages, self._clock())
        self._entries[name & self._slots] = entry

    def find(self, namespace: Namespace, tokens: TokenIds, num_matched: int) -> Eviction | None:
        """The eviction of the page that would go on from a match of `num_matched` tokens; None
        where the match does not end at a page's end, or nothing is known."""
        end = num_matched + self._page_size
        if num_matched % self._page_size or end > len(tokens):
            return None
        name = prefix_hash(namespace, tokens[:end], end)
        known, tick, turns, kind, num_pages, evicted_s = self._entries[name & self._slots].item()
        if known != name:
            return None
        return Eviction(Use(tick, turns, kind, num_pages, whole=False), evicted_s)


def prefix_hash(namespace: Namespace, tokens: TokenIds, length: int) -> int:
    """64 bits, never 0, of a namespace and the last tokens of a prefix, and its length."""
    seed = hash((namespace, length)) & _MASK
    last = np.ascontiguousarray(tokens[-NAMED_BY:])
    return xxhash.xxh3_64_intdigest(last.data, seed) or 1

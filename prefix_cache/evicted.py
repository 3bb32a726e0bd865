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
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Eviction:
    """A prefix that is gone: its last use, and the clock's time at which it was evicted."""

    use: Use
    evicted_s: float


class EvictedPrefixes:
    """A table of fixed size by the hash of a prefix; a new entry may push out an old one.

    It explains and it teaches the policy, nothing else: an entry never makes a hit, so a hash that
    two prefixes share costs a wrong sentence at worst.
    """

    def __init__(self, num_pages: int, page_size: int, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        size = 1 << max(_LEAST, _PER_PAGE * num_pages - 1).bit_length()
        self._page_size = page_size
        self._clock = clock
        self._slots = size - 1
        self._names = np.zeros(size, dtype=np.uint64)
        self._ticks = np.zeros(size, dtype=np.int64)
        self._uses = np.zeros((size, 3), dtype=np.int32)
        self._times_s = np.zeros(size, dtype=np.float64)

    def note(self, forest: RadixForest, leaf: Node, num_kept: int) -> None:
        """The pages of the leaf behind the first `num_kept` are about to be cut."""
        if not leaf.use.tick:
            return
        tokens = forest.path_tokens(leaf, (num_kept + 1) * self._page_size)
        name = prefix_hash(forest.namespace_of(leaf), tokens)
        slot = name & self._slots
        self._names[slot] = name
        self._ticks[slot] = leaf.use.tick
        self._uses[slot] = leaf.use.turns, leaf.use.kind, leaf.use.num_pages
        self._times_s[slot] = self._clock()

    def find(self, namespace: Namespace, tokens: TokenIds, num_matched: int) -> Eviction | None:
        """The eviction of the page that would go on from a match of `num_matched` tokens; None
        where the match does not end at a page's end, or nothing is known."""
        end = num_matched + self._page_size
        if num_matched % self._page_size or end > len(tokens):
            return None
        name = prefix_hash(namespace, tokens[:end])
        slot = name & self._slots
        if int(self._names[slot]) != name:
            return None
        turns, kind, num_pages = self._uses[slot].tolist()
        use = Use(int(self._ticks[slot]), turns, kind, num_pages, whole=False)
        return Eviction(use, float(self._times_s[slot]))


def prefix_hash(namespace: Namespace, tokens: TokenIds) -> int:
    """64 bits, never 0, of a namespace and all tokens of a prefix."""
    seed = hash(namespace) & _MASK
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data, seed) or 1

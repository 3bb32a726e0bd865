"""Where the last tokens of a growing sequence stood before."""

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.contract import Int32Array

MIN_MATCH: Final = 3
"""Fewer equal tokens are no match: they say too little of what follows."""
MAX_MATCH: Final = 32
"""More equal tokens than these are not told apart."""
MAX_CANDIDATES: Final = 16
"""Of the earlier places, so many are looked at, the latest first."""

_BITS: Final = 16
_FACTORS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_WORD: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Match:
    """The `length` tokens before `end` are those at the end of the sequence. 0 for none."""

    end: int
    length: int


_NONE: Final = Match(0, 0)


class NgramIndex:
    """Chains of the places with the same last `MIN_MATCH` tokens, as in LZ77: what `append` and
    `longest_match` cost does not depend on how long the sequence is."""

    def __init__(self, token_ids: Int32Array) -> None:
        """Takes in a whole prompt at once: about 15 ns a token."""
        self.tokens = array("i", token_ids.astype(np.int32).tobytes())
        buckets = _buckets(token_ids)
        order = np.argsort(buckets, kind="stable").astype(np.int32)
        grouped = buckets[order]
        is_last = np.ones(order.size, dtype=np.bool_)
        is_last[:-1] = grouped[1:] != grouped[:-1]
        offset = MIN_MATCH - 1
        previous = np.full(token_ids.size, -1, dtype=np.int32)
        previous[order[1:] + offset] = np.where(is_last[:-1], -1, order[:-1] + offset)
        head = np.full(1 << _BITS, -1, dtype=np.int32)
        head[grouped[is_last]] = order[is_last] + offset
        self._previous = array("i", previous.tobytes())
        self._head = array("i", head.tobytes())

    def append(self, token_id: int) -> None:
        """The sequence goes on."""
        tokens = self.tokens
        tokens.append(token_id)
        last = len(tokens) - 1
        if last < MIN_MATCH - 1:
            self._previous.append(-1)
            return
        bucket = _bucket(tokens[last - 2], tokens[last - 1], token_id)
        self._previous.append(self._head[bucket])
        self._head[bucket] = last

    def longest_match(self) -> Match:
        """The longest of the earlier places that the last tokens match, of equal ones the latest:
        among the last `MAX_CANDIDATES` with the same last tokens."""
        tokens, previous = self.tokens, self._previous
        last = len(tokens) - 1
        best = _NONE
        place = previous[last] if last >= 0 else -1
        for _ in range(MAX_CANDIDATES):
            if place < 0 or best.length == MAX_MATCH:
                break
            length = self._common(place, last)
            if length > max(best.length, MIN_MATCH - 1):
                best = Match(place + 1, length)
            place = previous[place]
        return best

    def _common(self, place: int, last: int) -> int:
        """How many tokens up to and with the one at `place` are those up to the last one."""
        tokens = self.tokens
        most = min(MAX_MATCH, place + 1)
        length = 0
        while length < most and tokens[place - length] == tokens[last - length]:
            length += 1
        return length


def _bucket(first: int, second: int, third: int) -> int:
    one, two, three = _FACTORS
    return ((first * one + second * two + third * three) & _WORD) >> (32 - _BITS)


def _buckets(token_ids: Int32Array) -> NDArray[np.uint16]:
    """As `_bucket`, of each three neighbours."""
    tokens = token_ids.astype(np.uint32)
    count = max(0, tokens.size - 2)
    mixed = np.zeros(count, dtype=np.uint32)
    for place, factor in enumerate(_FACTORS):
        mixed += tokens[place : place + count] * np.uint32(factor)
    return (mixed >> np.uint32(32 - _BITS)).astype(np.uint16)

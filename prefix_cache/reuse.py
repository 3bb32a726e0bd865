"""How soon a page will be used again, learned from when pages were used again before.

Pages come in kinds (`eviction.py`). For each kind the model keeps at which ages, counted in
requests that ended, pages were used again, and how many got that old. From these hazards it takes
the highest rate of reuses per tick that keeping a page for some time from now on can reach
(Gittins' index, J. R. Stat. Soc. B 41, 1979; LHD, NSDI 2018, ranks cached objects alike).
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NUM_BUCKETS: Final = 40
"""Of ages, two for each doubling: up to a million ended requests."""
_REMEMBERED: Final = 1 << 16
"""Requests of which it is known exactly how many got how old; counts halve each so many."""
_SHRINKAGE: Final = 5.0
"""Requests of all kinds that a kind without a past is believed to be like."""
_PRIOR: Final = 0.05
_FIRST_REBUILD: Final = 32
_REBUILD_EVERY: Final = 128

Float64Array = NDArray[np.float64]

_EDGES: Final[Float64Array] = np.concatenate(([0.0], 2.0 ** (np.arange(_NUM_BUCKETS) / 2)))
_WIDTHS: Final[Float64Array] = np.diff(_EDGES)


def bucket(age: int) -> int:
    """Which range of ages this is in."""
    return min(_NUM_BUCKETS - 1, int(2 * math.log2(age)) + 1) if age > 0 else 0


class ReuseModel:
    """Counts ends and reuses by kind and age; `rate` answers from a table built now and then.

    Kinds come in pairs, 2k and 2k+1: what a request left, and the page it ended in; both begin to
    age together.
    """

    def __init__(self, num_pairs: int) -> None:
        self._hits: Float64Array = np.zeros((2 * num_pairs, _NUM_BUCKETS))
        self._recent = np.full(_REMEMBERED, -1, dtype=np.int16)
        self._starts: Float64Array = np.zeros(num_pairs)
        self._num_starts = 0
        self._next_rebuild = _FIRST_REBUILD
        self._table: list[list[float]] = []
        self._rebuild()

    def started(self, pair: int) -> None:
        """A request left pages of this pair of kinds just now: a tick."""
        slot = self._num_starts % _REMEMBERED
        if self._num_starts and not slot:
            self._hits *= 0.5
            self._starts *= 0.5
        self._recent[slot] = pair
        self._starts[pair] += 1
        self._num_starts += 1

    def reused(self, kind: int, age: int) -> None:
        """Pages of the kind were used again at that age, or would have been, had they stayed."""
        self._hits[kind, bucket(age)] += 1

    def rate(self, kind: int, age: int) -> float:
        """Reuses per tick to be expected of a page of that kind and age while it is worth most."""
        return self._table[kind][bucket(age)]

    def refresh(self) -> None:
        """Build the table again if enough was learned since."""
        if self._num_starts >= self._next_rebuild:
            self._next_rebuild = self._num_starts + min(self._num_starts, _REBUILD_EVERY)
            self._rebuild()

    def _rebuild(self) -> None:
        at_risk = self._older_than_edges() - _before(self._hits)
        every = _hazard(self._hits.sum(0), at_risk.sum(0), np.full(_NUM_BUCKETS, _PRIOR), 20.0)
        hazard = _hazard(self._hits, at_risk, every, _SHRINKAGE)
        self._table = _best_rates(hazard).tolist()

    def _older_than_edges(self) -> Float64Array:
        """How many starts of each kind are at least as old as each bucket's lower edge."""
        num_pairs = len(self._starts)
        known = min(self._num_starts, _REMEMBERED)
        newest_first = self._recent[(self._num_starts - 1 - np.arange(known)) % _REMEMBERED]
        ages = np.arange(1, known + 1)
        first_bucket = np.searchsorted(_EDGES[:-1], ages, side="right") - 1
        flat = newest_first.astype(np.int64) * _NUM_BUCKETS + first_bucket
        counts = np.bincount(flat, minlength=num_pairs * _NUM_BUCKETS)
        recent = counts.reshape(num_pairs, _NUM_BUCKETS).astype(np.float64)
        return np.repeat(self._starts[:, None] - _before(recent), 2, axis=0)


def _before(counts: Float64Array) -> Float64Array:
    """Along the ages, the sum of all earlier buckets."""
    sums: Float64Array = np.cumsum(counts, axis=-1) - counts
    return sums


def _hazard(
    hits: Float64Array, at_risk: Float64Array, prior: Float64Array, weight: float
) -> Float64Array:
    """Chance of a reuse within each bucket for what was not reused before it."""
    chance = (hits + weight * prior) / (np.maximum(at_risk, 0.0) + weight)
    bounded: Float64Array = np.minimum(chance, 0.95)
    return bounded


def _best_rates(hazard: Float64Array) -> Float64Array:
    """For each kind and present bucket, the best ratio of expected reuses to expected time over
    all times at which one could give up."""
    best: Float64Array = np.zeros_like(hazard)
    for first in range(hazard.shape[1]):
        chances = hazard[:, first:]
        alive = np.cumprod(1.0 - chances, axis=1) / (1.0 - chances)
        reuses = np.cumsum(alive * chances, axis=1)
        time = np.cumsum(alive * (1.0 - chances / 2) * _WIDTHS[first:], axis=1)
        best[:, first] = (reuses / time).max(axis=1)
    return best

"""How long a step takes: a linear model of its work, learned from every step."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul
from typing import Final

from engine.scheduling.step_plan import ScheduledChunk

_PRIOR: Final = (4.0, 1.0, 2.0, 2e-3, 2e-3)
"""Milliseconds per step, row of logits, token, key read by a lone token, and query-key pair of a
chunk, before anything was measured: a slow machine, so that first chunks are small."""
_LOWEST: Final = 1e-4
_HIGHEST: Final = 1e2
"""Bounds of each cost, as multiples of its prior."""
_DRIFT: Final = 0.01
"""How much each cost may change from one step to the next, relative to itself."""
_DOUBT: Final = 0.3
"""The same when the pace changes: perhaps it is a cost that does."""
_NEGLIGIBLE: Final = 0.1
"""A cost is negligible if it is so small a part of its prior, on a machine of the prior's pace."""
_OUTLIER: Final = 3.0
"""Surprises beyond that many standard deviations count as that many."""
_LASTING: Final = 3
"""So many outliers in a row on one side are no outliers: the machine has another pace."""
_PACE_RANGE: Final = (0.05, 20.0)
_ERROR_RANGE: Final = (0.02, 0.5)
_ERROR_MEMORY: Final = 0.05
_FIRST_ERROR: Final = 0.2


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, in the units of the model: rows of logits, new tokens, keys read by
    chunks of one token, and of longer chunks query-key pairs, and keys read once by all of one."""

    rows: int = 0
    tokens: int = 0
    keys: int = 0
    pairs: int = 0
    read: int = 0

    @staticmethod
    def of(chunks: Iterable[ScheduledChunk]) -> "StepWork":
        """The work of a plan."""
        rows = tokens = keys = pairs = read = 0
        for chunk in chunks:
            length = chunk.end - chunk.start
            tokens += length
            rows += chunk.num_sampled + len(chunk.scored)
            if length == 1:
                keys += chunk.end
            else:
                pairs += num_pairs(chunk.start, length)
                read += chunk.start
        return StepWork(rows, tokens, keys, pairs, read)


def num_pairs(past: int, length: int) -> int:
    """Query-key pairs of a chunk of `length` tokens behind `past` others."""
    return length * past + length * (length + 1) // 2


class StepTimeModel:
    """milliseconds = pace * cost · (1, rows, tokens, keys, pairs), by a Kalman filter whose costs
    drift, and a pace that steps.

    Each cost stays within fixed bounds, and so does its uncertainty: what was not seen for long
    is learned anew from few steps. One stray step moves it by three of its usual errors at most.
    Several in a row on one side are not strays: the machine is slower or faster than it was, all
    costs alike, by as much as the least of them shows. So a neighbour that takes a core for a
    second changes the pace twice, within three steps each time, and costs nothing that was known.

    A longer chunk reads a key as a lone token does; what that costs is learned from lone tokens
    alone, as the chunks of one prompt are too alike to tell it from the cost of their pairs.

    Numbers and short lists, no arrays: this runs in every step, and five by five is too little
    for them to pay.
    """

    def __init__(self) -> None:
        self._cost = list(_PRIOR)
        self._bounds = [(cost * _LOWEST, cost * _HIGHEST) for cost in _PRIOR]
        self._covariance = [
            [cost**2 if j == i else 0.0 for j in range(len(_PRIOR))]
            for i, cost in enumerate(_PRIOR)
        ]
        self._pace = 1.0
        self._error = _FIRST_ERROR
        self._outliers: list[float] = []
        self.num_steps = 0

    @property
    def error(self) -> float:
        """The usual difference of a step from its prediction, relative to it, within bounds."""
        return self._error

    @property
    def is_changing(self) -> bool:
        """Whether the last steps were off by more than strays are: the pace was wrong for them."""
        return len(self._outliers) > 1

    @property
    def token_ms(self) -> float:
        """One more token in a step, without its attention."""
        return self._pace * self._cost[2]

    @property
    def row_ms(self) -> float:
        """One more row of logits."""
        return self._pace * self._cost[1]

    @property
    def key_ms(self) -> float:
        """One more key for a chunk of one token."""
        return self._pace * self._cost[3]

    @property
    def pair_ms(self) -> float:
        """One more query-key pair of a longer chunk."""
        return self._pace * self._cost[4]

    def chunk_ms(self, past: int, length: int) -> float:
        """Computing so many tokens behind `past` others, in a step that is made anyway."""
        return self.reading_ms(past) + self.longer_ms(past, length)

    def reading_ms(self, past: int) -> float:
        """What a chunk behind so many tokens takes before its first one."""
        return past * self.key_ms

    def longer_ms(self, past: int, length: int) -> float:
        """So many tokens more in a chunk that is computed anyway, with `past` before them."""
        pairs = length * past + length * (length + 1) / 2
        return length * self.token_ms + pairs * self.pair_ms

    def predict(self, work: StepWork) -> float:
        """Milliseconds from the last step's tokens to those of a step with this work."""
        fixed, row, token, key, pair = self._cost
        keys = work.keys + work.read
        ms = fixed + row * work.rows + token * work.tokens + key * keys + pair * work.pairs
        return self._pace * ms

    def learn(self, work: StepWork, took_ms: float) -> None:
        """Take in one step, O(1)."""
        self.num_steps += 1
        features = (1.0, work.rows, work.tokens, work.keys, work.pairs)
        predicted = self.predict(work)
        spread = [sum(map(mul, row, features)) for row in self._covariance]
        variance = sum(map(mul, spread, features)) + (self._error * predicted / self._pace) ** 2
        pace, lasting = self._pace, False
        surprise = (took_ms - predicted) / pace
        deviations = surprise / variance**0.5
        ratio = took_ms / predicted
        if abs(deviations) > _OUTLIER:
            surprise *= _OUTLIER / abs(deviations)
            if lasting := self._is_lasting(ratio):
                self._change_pace()
                surprise = took_ms / self._pace - predicted / pace
        else:
            self._outliers.clear()
        self._move(spread, variance, surprise / variance, _DOUBT if lasting else _DRIFT)
        low, high = _ERROR_RANGE
        # What is no noise, strays and a bias, must not pass for it: who expects noise learns less.
        off = min(abs(ratio - 1), _OUTLIER * self._error)
        error = self._error + _ERROR_MEMORY * (off - self._error)
        self._error = min(max(low, error), high)

    def _is_lasting(self, ratio: float) -> bool:
        """Whether the last ones were outliers on this side as well."""
        if self._outliers and (self._outliers[-1] > 1) != (ratio > 1):
            self._outliers.clear()
        self._outliers = [*self._outliers[1 - _LASTING :], ratio]
        return len(self._outliers) == _LASTING

    def _change_pace(self) -> None:
        """By what all of the last outliers have in common."""
        common = min(self._outliers) if self._outliers[-1] > 1 else max(self._outliers)
        low, high = _PACE_RANGE
        self._pace = min(max(self._pace * common, low), high)
        self._outliers = [ratio / common for ratio in self._outliers]

    def _move(self, spread: list[float], variance: float, step: float, drift: float) -> None:
        """Costs go along `spread`, and what is known of them. They may have drifted since; no
        uncertainty is above the cost itself, or what would be negligible on such a machine: one
        that once came out as nothing is found again."""
        covariance, cost = self._covariance, self._cost
        pace = _NEGLIGIBLE * cost[2] / _PRIOR[2]
        shrink: list[float] = []
        for i, (share, (low, high)) in enumerate(zip(spread, self._bounds, strict=True)):
            cost[i] = now = min(max(cost[i] + share * step, low), high)
            size = max(now, pace * _PRIOR[i])
            own = covariance[i][i] - share * share / variance + (drift * size) ** 2
            covariance[i][i] = own
            shrink.append(min(1.0, size / own**0.5))
            gain, row = share / variance, covariance[i]
            for j in range(i):
                row[j] = covariance[j][i] = (row[j] - gain * spread[j]) * shrink[i] * shrink[j]
        for i, factor in enumerate(shrink):
            covariance[i][i] *= factor * factor

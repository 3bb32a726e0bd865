"""How long a step takes: a linear model of its work, learned from every step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.step_plan import ScheduledChunk

Float64Array = NDArray[np.float64]

_PRIOR: Final = (4.0, 1.0, 2.0, 2e-3, 2e-3)
"""Milliseconds per step, row of logits, token, key read by a lone token, and query-key pair of a
chunk, before anything was measured: a slow machine, so that first chunks are small."""
_LOWEST: Final = 1e-4
_HIGHEST: Final = 1e2
"""Bounds of each cost, as multiples of its prior."""
_DRIFT: Final = 0.01
"""How much each cost may change from one step to the next, relative to itself."""
_OUTLIER: Final = 3.0
"""Surprises beyond that many standard deviations count as that many."""
_LASTING: Final = 4
"""So many outliers in a row on one side are no outliers: the machine has changed."""
_ERROR_RANGE: Final = (0.02, 0.5)
_ERROR_MEMORY: Final = 0.05
_FIRST_ERROR: Final = 0.2


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, in the units of the model: rows of logits, new tokens, keys read by
    chunks of one token, and query-key pairs of longer chunks."""

    rows: int = 0
    tokens: int = 0
    keys: int = 0
    pairs: int = 0

    @staticmethod
    def of(chunks: Iterable[ScheduledChunk]) -> "StepWork":
        """The work of a plan."""
        rows = tokens = keys = pairs = 0
        for chunk in chunks:
            length = chunk.end - chunk.start
            tokens += length
            rows += chunk.wants_logits + len(chunk.scored)
            if length == 1:
                keys += chunk.end
            else:
                pairs += num_pairs(chunk.start, length)
        return StepWork(rows, tokens, keys, pairs)


def num_pairs(past: int, length: int) -> int:
    """Query-key pairs of a chunk of `length` tokens behind `past` others."""
    return length * past + length * (length + 1) // 2


class StepTimeModel:
    """milliseconds = cost · (1, rows, tokens, keys, pairs), by a Kalman filter whose costs drift.

    Each cost stays within fixed bounds, and so does its uncertainty: what was not seen for long
    is learned anew from few steps. One stray step moves it by three of its usual errors at most;
    several in a row on one side make it doubt all it knows, so that a machine that has become
    slower or faster is followed within a few steps.
    """

    def __init__(self) -> None:
        self._cost: Float64Array = np.array(_PRIOR)
        self._low = self._cost * _LOWEST
        self._high = self._cost * _HIGHEST
        self._covariance: Float64Array = np.diag(self._cost**2)
        self._error = _FIRST_ERROR
        self._run_of_outliers = 0
        self.num_steps = 0

    @property
    def error(self) -> float:
        """The usual difference of a step from its prediction, relative to it, within bounds."""
        return self._error

    @property
    def token_ms(self) -> float:
        """One more token in a step, without its attention."""
        return float(self._cost[2])

    @property
    def row_ms(self) -> float:
        """One more row of logits."""
        return float(self._cost[1])

    @property
    def key_ms(self) -> float:
        """One more key for a chunk of one token."""
        return float(self._cost[3])

    @property
    def pair_ms(self) -> float:
        """One more query-key pair of a longer chunk."""
        return float(self._cost[4])

    def chunk_ms(self, past: int, length: int) -> float:
        """Computing so many tokens behind `past` others, in a step that is made anyway."""
        pairs = length * past + length * (length + 1) / 2
        return length * self.token_ms + pairs * self.pair_ms

    def predict(self, work: StepWork) -> float:
        """Milliseconds from the last step's tokens to those of a step with this work."""
        return float(self._cost @ _features(work))

    def learn(self, work: StepWork, took_ms: float) -> None:
        """Take in one step, O(1)."""
        self.num_steps += 1
        features = _features(work)
        predicted = float(self._cost @ features)
        spread = self._covariance @ features
        variance = float(features @ spread) + (self._error * predicted) ** 2
        surprise = took_ms - predicted
        deviations = surprise / variance**0.5
        if abs(deviations) > _OUTLIER:
            surprise *= _OUTLIER / abs(deviations)
            side = 1 if deviations > 0 else -1
            same = self._run_of_outliers * side >= 0
            self._run_of_outliers = self._run_of_outliers + side if same else side
        else:
            self._run_of_outliers = 0
        gain = spread / variance
        self._cost = np.clip(self._cost + gain * surprise, self._low, self._high)
        self._covariance = self._covariance - np.outer(gain, spread)
        self._forget(lasting=abs(self._run_of_outliers) >= _LASTING)
        low, high = _ERROR_RANGE
        off = min(abs(took_ms - predicted) / predicted, high)
        self._error = max(low, self._error + _ERROR_MEMORY * (off - self._error))

    def _forget(self, *, lasting: bool) -> None:
        """Costs may have drifted since; no uncertainty is above the cost itself."""
        drift = 0.3 if lasting else _DRIFT
        covariance = self._covariance + np.diag((drift * self._cost) ** 2)
        widths = np.sqrt(np.diag(covariance))
        shrink = np.minimum(1.0, self._cost / widths)
        covariance = covariance * np.outer(shrink, shrink)
        self._covariance = (covariance + covariance.T) / 2


def _features(work: StepWork) -> Float64Array:
    return np.array([1.0, work.rows, work.tokens, work.keys, work.pairs])

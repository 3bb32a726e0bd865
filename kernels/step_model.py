"""How long a step takes, from its shape: a few coefficients fitted to measured steps.

t = c0 + c1·T + c2·⌈T/8⌉ + c3·K + c4·P + c5·⌈R/8⌉, with T new tokens, K keys read (once per
sequence), P (query, key) pairs beyond them, and R rows of logits. c0 holds what every step pays:
the weights read once, and its start. Products take their rows by eights, and unpack the weights
once for each. All coefficients are at least 0, so no shape is predicted to be faster than a
smaller one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.roofline import BatchShape, visible_pairs

ROWS: Final = 8
"""Rows that a product takes at a time."""
_ROUNDS: Final = 5000


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Predicts seconds of a step; made by `fit`."""

    coefficients: tuple[float, ...]

    def predict(self, shape: BatchShape) -> float:
        """Seconds."""
        return float(np.dot(self.coefficients, _features(shape)))

    @staticmethod
    def fit(shapes: Sequence[BatchShape], seconds: Sequence[float]) -> "StepTimeModel":
        """The coefficients, none negative, with the least squared relative error."""
        measured = np.array(seconds)
        rows = np.array([_features(shape) for shape in shapes]) / measured[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-300)
        solved = _least_squares(rows / scale, np.ones(len(measured)))
        return StepTimeModel(tuple((solved / scale).tolist()))


def _features(shape: BatchShape) -> list[float]:
    tokens = shape.num_tokens
    keys = sum(context for _, context in shape.sequences)
    pairs = sum(visible_pairs(new, context, 0) for new, context in shape.sequences)
    passes, head_passes = -(-tokens // ROWS), -(-shape.num_rows // ROWS)
    return [1.0, tokens, passes, keys, pairs - keys, head_passes]


def _least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative least squares by the active set method of Lawson and Hanson (1974)."""
    num = matrix.shape[1]
    solution = np.zeros(num)
    passive = np.zeros(num, dtype=bool)
    for _ in range(_ROUNDS):
        gradient = matrix.T @ (wanted - matrix @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() < 1e-10:
            break
        passive[gradient.argmax()] = True
        while True:
            trial = np.zeros(num)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], wanted, rcond=None)[0]
            if (trial[passive] > 0).all():
                solution = trial
                break
            below = passive & (trial <= 0)
            steps = solution[below] / (solution[below] - trial[below])
            solution = solution + steps.min() * (trial - solution)
            passive &= solution > 1e-12
            solution[~passive] = 0.0
    return solution

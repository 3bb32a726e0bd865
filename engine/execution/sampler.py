"""From logits to tokens.

A row is changed first where its request asks for that (`penalties.py`), which needs the full row.
A row's token depends on its logits, its parameters, its seed and its position alone. The filters
apply in the order temperature, top-k, top-p, min-p, each to the renormalised survivors of the one
before (as in `transformers`); one uniform number then picks from what is left by the inverse of
the cumulative distribution. Arithmetic is float64, so few large logits, asked of the backend, give
the same token as the full row would.
"""

from collections.abc import Sequence
from math import isfinite

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.execution.penalties import LogitRules, changes_logits
from engine.types import SamplingParams, TokenLogprobs
from kernels.contract import Float32Array, StepLogits

MAX_NUM_TOP = 64
"""More than this many largest logits are not asked for: the full row is cheaper then."""

_FIRST_CUT = 256
_MASK = (1 << 64) - 1
_Ids = NDArray[np.intp]
_Float64Array = NDArray[np.float64]


class SampledToken(msgspec.Struct, frozen=True):
    """The chosen token, and its log-probabilities where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


def required_top(rows: Sequence[SamplingParams], vocab_size: int) -> int:
    """How many of the largest logits suffice for all rows; 0 when a row needs them all.

    Log-probabilities ask for full rows: their normaliser is computed here, by one way of summing,
    so that it has the same bits whatever else is in the batch.
    """
    need = 1
    for params in rows:
        if params.logprobs is not None or changes_logits(params):
            return 0
        if params.temperature > 0.0:
            if not 0 < params.top_k <= min(MAX_NUM_TOP, vocab_size):
                return 0
            need = max(need, params.top_k)
    return need


class Sampler:
    """The rows of one step, to be sampled from in any order: a row may have to wait for what the
    one before it gives. -inf is a legal logit (a token that cannot be chosen); NaN, +inf, or a row
    of nothing but -inf are not."""

    __slots__ = ("_finite", "_greedy", "_logits")

    def __init__(self, logits: StepLogits) -> None:
        self._logits = logits
        if logits.full is not None:
            greedy = logits.full.argmax(axis=1)
            best = np.take_along_axis(logits.full, greedy[:, None], axis=1)[:, 0]
        else:
            assert logits.top_ids is not None and logits.logsumexp is not None
            if logits.logsumexp.size == 1:  # a lone stream is worth two views of arrays
                self._greedy = [logits.top_ids.item(0)]
                self._finite = [isfinite(logits.logsumexp.item(0))]
                return
            greedy, best = logits.top_ids[:, 0], logits.logsumexp
        self._greedy = greedy.tolist()
        self._finite = [isfinite(value) for value in best.tolist()]

    def choose(
        self, row: int, params: SamplingParams, position: int, rules: LogitRules | None = None
    ) -> SampledToken | None:
        """A token from a row; None where the row is not finite.

        `position` is the one it will have in its sequence. `rules`, which know all tokens before
        it, change the row before the choice; they need full rows.
        """
        if not self._finite[row]:
            return None
        logits, token_id = self._logits, self._greedy[row]
        if rules is not None:
            assert logits.full is not None
            token_id = _sample_changed(logits.full[row], params, position, rules)
            if token_id < 0:
                return None
        elif params.temperature > 0.0:
            token_id = _draw(logits, row, params, uniform_at(params.seed, position))
        logprobs = None
        if params.logprobs is not None:
            assert logits.full is not None
            logprobs = score(logits.full[row], token_id, params.logprobs)
        return SampledToken(token_id, logprobs)


def score(row: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """A token's log-probability under float32 [vocab], and those of the `num_top` likeliest: the
    raw distribution, log-softmax of the unscaled logits, in float64."""
    exact = row.astype(np.float64)
    peak = exact.max()
    normaliser = peak + np.log(np.exp(exact - peak).sum())
    ids = largest(row, num_top) if num_top else np.empty(0, dtype=np.intp)
    return TokenLogprobs(
        float(exact[token_id] - normaliser),
        tuple(ids.tolist()),
        tuple((exact[ids] - normaliser).tolist()),
    )


def uniform_at(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits: SplitMix64's output function, first over the seed, then
    over the sum of that and the position's multiple of the golden gamma."""
    return (_mix(_mix(seed) + 0x9E3779B97F4A7C15 * (position + 1)) >> 11) * 2.0**-53


def largest(row: Float32Array, count: int) -> _Ids:
    """Ids of the `count` largest of float32 [vocab], by falling value, ties by rising id."""
    if count >= row.size:
        return np.argsort(-row, kind="stable")
    threshold = np.partition(row, row.size - count)[row.size - count]
    ids = np.flatnonzero(row >= threshold)
    return ids[np.argsort(-row[ids], kind="stable")][:count]


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _sample_changed(
    row: Float32Array, params: SamplingParams, position: int, rules: LogitRules
) -> int:
    """A token of float32 [vocab] after the request's own rules; -1 where they leave none."""
    changed = rules.apply(row)
    rules.forbid_end(changed)
    token_id = int(changed.argmax())
    if not np.isfinite(changed[token_id]):
        return -1
    if params.temperature > 0.0:
        uniform = uniform_at(params.seed, position)
        token_id = _draw(StepLogits(changed[None]), 0, params, uniform)
    return token_id


def _draw(logits: StepLogits, row: int, params: SamplingParams, uniform: float) -> int:
    """One token of a row by temperature and filters."""
    if logits.full is None:
        assert logits.top_ids is not None and logits.top_logits is not None
        ids: NDArray[np.signedinteger] = logits.top_ids[row, : params.top_k]
        weights = _weights(logits.top_logits[row, : params.top_k], params.temperature)
        return int(ids[_pick(_keep(weights, weights.sum(), params), uniform)])
    full = logits.full[row]
    if 0 < params.top_k < full.size:
        ids = largest(full, params.top_k)
        weights = _weights(full[ids], params.temperature)
        return int(ids[_pick(_keep(weights, weights.sum(), params), uniform)])
    weights = _weights(full, params.temperature)
    if params.top_p == 1.0:
        return _pick(_keep(weights, weights.sum(), params), uniform)
    ids, weights = _nucleus(full, weights, params)
    return int(ids[_pick(weights, uniform)])


def _weights(logits: Float32Array, temperature: float) -> _Float64Array:
    """Unnormalised probabilities, the largest 1."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= temperature
    return np.exp(scaled, out=scaled)


def _keep(weights: _Float64Array, total: float, params: SamplingParams) -> _Float64Array:
    """Apply top-p (weights must fall then) and min-p: the same weights, or fewer, or with zeros."""
    if params.top_p < 1.0:
        before = np.cumsum(weights) - weights
        weights = weights[: max(1, int(np.searchsorted(before, params.top_p * total)))]
    if params.min_p > 0.0:
        weights = np.where(weights >= params.min_p * weights.max(), weights, 0.0)
    return weights


def _nucleus(
    full: Float32Array, weights: _Float64Array, params: SamplingParams
) -> tuple[_Ids, _Float64Array]:
    """Top-p over a whole row, sorting no more of it than the mass asked for needs."""
    total = weights.sum()
    count = _FIRST_CUT
    while True:
        ids = largest(full, count)
        kept = _keep(weights[ids], total, params)
        if kept.size < count or count >= full.size:
            return ids[: kept.size], kept
        count *= 16


def _pick(weights: _Float64Array, uniform: float) -> int:
    """The index whose stretch of the cumulative weights holds `uniform` of their sum."""
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    last = int(np.searchsorted(cumulative, total))
    return min(int(np.searchsorted(cumulative, uniform * total, side="right")), last)

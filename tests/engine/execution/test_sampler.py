"""The sampler against a plain reference, and its independence from the batch."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.execution.sampler import MAX_NUM_TOP, largest, required_top, uniform_at
from engine.types import SamplingParams
from kernels.contract import Float32Array, StepLogits
from tests.engine.execution.sampling import sample

VOCAB = 1000


def rows(count: int, *, spread: float = 3.0, vocab: int = VOCAB) -> Float32Array:
    rng = np.random.default_rng(3)
    return rng.normal(0.0, spread, (count, vocab)).astype(np.float32)


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(SamplingParams(8, temperature=1.0), **changes)


def top_of(full: Float32Array, num_top: int) -> StepLogits:
    """What a backend returns instead of `full`."""
    ids = np.argsort(-full, axis=1, kind="stable")[:, :num_top].astype(np.int32)
    exact = full.astype(np.float64)
    lse = np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1)) + exact.max(axis=1)
    return StepLogits(None, ids, np.take_along_axis(full, ids, axis=1), lse.astype(np.float32))


def plain_distribution(row: Float32Array, p: SamplingParams) -> NDArray[np.float64]:
    """The filters one after the other, in the slowest way."""
    logit: list[float] = row.tolist()
    order = sorted(range(row.size), key=lambda i: (-logit[i], i))
    kept = order[: p.top_k] if p.top_k else order
    weight = {i: math.exp((logit[i] - logit[order[0]]) / p.temperature) for i in kept}
    total, mass, nucleus = math.fsum(weight.values()), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weight[i]
        if mass >= p.top_p * total:
            break
    best = weight[nucleus[0]]
    final = {i: weight[i] for i in nucleus if weight[i] >= p.min_p * best}
    probabilities = np.zeros(row.size)
    probabilities[list(final)] = list(final.values())
    probabilities /= probabilities.sum()
    return probabilities


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 1},
    {"top_p": 0.01},
    {"temperature": 3.0, "top_p": 0.999},
]


@pytest.mark.parametrize("changes", FILTERS)
def test_draws_follow_the_plain_distribution(changes: dict[str, float]) -> None:
    """2,000 seeds: no token outside the support, and a chi-square over it within 5 sigma."""
    row, p = rows(1)[0], params(**changes)
    expected = plain_distribution(row, p)
    count = 2000
    full = np.broadcast_to(row, (count, VOCAB))
    drawn = sample(
        StepLogits(full),
        [msgspec.structs.replace(p, seed=seed) for seed in range(count)],
        [17] * count,
    )
    counts = np.bincount([t.token_id for t in drawn if t], minlength=VOCAB)
    assert counts.sum() == count
    assert not counts[expected == 0].any()
    often = expected * count >= 5
    cells = [*zip(counts[often], expected[often] * count, strict=True)]
    rest = expected[~often].sum() * count
    if rest >= 5:
        cells.append((counts[~often].sum(), rest))
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = max(1, len(cells) - 1)
    assert chi2 <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("changes", FILTERS)
def test_positions_are_as_good_as_seeds(changes: dict[str, float]) -> None:
    row, p = rows(1)[0], params(seed=99, **changes)
    count = 1000
    full = np.broadcast_to(row, (count, VOCAB))
    drawn = sample(StepLogits(full), [p] * count, range(count))
    counts = np.bincount([t.token_id for t in drawn if t], minlength=VOCAB)
    best = int(row.argmax())
    share = plain_distribution(row, p)[best]
    assert abs(counts[best] - count * share) <= 5 * math.sqrt(count * share * (1 - share)) + 1e-9


@pytest.mark.parametrize("vocab", [300, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_the_same_token_as_the_plain_way(vocab: int, spread: float) -> None:
    """Inverse of the cumulative distribution, token by token, in the order the sampler states."""
    for seed, row in enumerate(rows(4, spread=spread, vocab=vocab)):
        for changes in FILTERS:
            p = params(seed=seed, **changes)
            [token] = sample(StepLogits(row[None]), [p], [5])
            probabilities = plain_distribution(row, p)
            by_value = p.top_k > 0 or p.top_p < 1.0
            order = np.argsort(-row, kind="stable") if by_value else np.arange(vocab)
            cumulative = np.cumsum(probabilities[order])
            at = np.searchsorted(cumulative, uniform_at(seed, 5), side="right")
            assert token is not None
            near = order[max(0, at - 1) : at + 2]
            assert token.token_id in near
            assert probabilities[token.token_id] > 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Alone, in any order, among any neighbours: the same token and the same bits."""
    full = rows(12)
    many = [params(seed=i, logprobs=i % 4 or None, **FILTERS[i % len(FILTERS)]) for i in range(12)]
    positions = [3 * i for i in range(12)]
    together = sample(StepLogits(full), many, positions)
    for i in range(12):
        assert sample(StepLogits(full[i : i + 1]), [many[i]], positions[i : i + 1]) == [together[i]]
    back = sample(StepLogits(full[::-1].copy()), many[::-1], positions[::-1])
    assert back == together[::-1]


def test_few_largest_logits_give_the_same_tokens() -> None:
    full = rows(30)
    full[3, [5, 9, 40]] = full[3].max() + 1  # ties
    many = [
        params(seed=i, temperature=(0.0, 0.7, 1.5)[i % 3], top_k=(1, 3, 40)[i % 3], top_p=0.9)
        for i in range(30)
    ]
    positions = list(range(30))
    num_top = required_top(many, VOCAB)
    assert num_top == 40
    assert sample(top_of(full, num_top), many, positions) == sample(
        StepLogits(full), many, positions
    )


def test_how_many_logits_are_asked_for() -> None:
    greedy = params(temperature=0.0)
    assert required_top([greedy, greedy], VOCAB) == 1
    assert required_top([], VOCAB) == 1
    assert required_top([greedy, params(top_k=20)], VOCAB) == 20
    assert required_top([greedy, params(top_k=MAX_NUM_TOP)], VOCAB) == MAX_NUM_TOP
    assert required_top([greedy, params(top_k=MAX_NUM_TOP + 1)], VOCAB) == 0
    assert required_top([greedy, params(top_p=0.9)], VOCAB) == 0
    assert required_top([greedy, params(temperature=0.0, logprobs=0)], VOCAB) == 0
    assert required_top([greedy, params(top_k=20)], vocab_size=19) == 0


def test_greedy_takes_the_first_of_equals() -> None:
    full = np.zeros((1, VOCAB), dtype=np.float32)
    full[0, [7, 300]] = 2.0
    for logits in (StepLogits(full), top_of(full, 1)):
        [token] = sample(logits, [params(temperature=0.0)], [0])
        assert token is not None and token.token_id == 7


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = rows(1)[0]
    p = params(temperature=0.3, top_k=7, logprobs=4)
    [token] = sample(StepLogits(row[None]), [p], [2])
    assert token is not None and token.logprobs is not None
    exact = row.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum())
    order = np.argsort(-expected, kind="stable")[:4]
    assert token.logprobs.top_ids == tuple(order.tolist())
    np.testing.assert_allclose(token.logprobs.top_logprobs, expected[order], rtol=1e-12)
    assert token.logprobs.logprob == pytest.approx(expected[token.token_id], rel=1e-12)
    [bare] = sample(StepLogits(row[None]), [msgspec.structs.replace(p, logprobs=0)], [2])
    assert bare is not None and bare.logprobs is not None
    assert (bare.logprobs.logprob, bare.logprobs.top_ids) == (token.logprobs.logprob, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    full = rows(3)
    good = sample(StepLogits(full), [params(temperature=temperature)] * 3, [1, 2, 3])
    full[1, 77] = bad
    with np.errstate(all="raise"):
        mixed = sample(StepLogits(full), [params(temperature=temperature)] * 3, [1, 2, 3])
    assert mixed == [good[0], None, good[2]]
    top = replace(top_of(rows(3), 1), logsumexp=np.array([1.0, bad, 1.0], dtype=np.float32))
    assert [t is None for t in sample(top, [params(temperature=0.0)] * 3, [1, 2, 3])] == [
        False,
        True,
        False,
    ]


def test_masked_tokens_are_never_drawn() -> None:
    full = np.full((1, VOCAB), -np.inf, dtype=np.float32)
    assert sample(StepLogits(full), [params()], [0]) == [None]
    full[0, [3, 8]] = -5.0
    drawn = {
        token.token_id
        for seed in range(200)
        for changes in FILTERS
        if (token := sample(StepLogits(full), [params(seed=seed, **changes)], [0])[0])
    }
    assert drawn == {3, 8}


@pytest.mark.parametrize("temperature", [1e-30, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    full = rows(1)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        [token] = sample(StepLogits(full), [params(temperature=temperature)], [0])
    assert token is not None
    if temperature < 1:
        assert token.token_id == full.argmax()


def test_filters_wider_than_the_vocabulary() -> None:
    full = rows(1, vocab=10)
    wide = params(top_k=50, top_p=0.999999, logprobs=20)
    [token] = sample(StepLogits(full), [wide], [0])
    assert token is not None and token.logprobs is not None
    assert len(token.logprobs.top_ids) == 10


def test_the_stream_is_counted_not_remembered() -> None:
    draws = np.array([[uniform_at(seed, at) for at in range(100)] for seed in range(100)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(np.unique(draws)) == draws.size
    assert abs(draws.mean() - 0.5) < 5 / math.sqrt(12 * draws.size)
    for axis in (0, 1):
        shifted = np.roll(draws, 1, axis=axis)
        correlation = np.corrcoef(draws.ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(draws.size)
    assert uniform_at(2**63 - 1, 2**31) == uniform_at(2**63 - 1, 2**31)


@pytest.mark.parametrize("count", [1, 2, 10, 299, 300, 400])
def test_largest_orders_ties_by_id(count: int) -> None:
    row = np.random.default_rng(1).integers(0, 20, 300).astype(np.float32)
    expected = sorted(range(300), key=lambda i: (-row[i], i))[:count]
    assert largest(row, count).tolist() == expected

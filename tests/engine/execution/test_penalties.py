"""Penalties, biases and bans, against a plain account of the same rules."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from engine.execution.penalties import LogitRules, changes_logits
from engine.execution.sampler import required_top
from engine.types import SamplingParams
from kernels.contract import Float32Array, StepLogits
from tests.engine.execution.sampling import sample

VOCAB = 40
EOS = 39
NEG_INF = float("-inf")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, **changes})


def rules_after(sampling: SamplingParams, prompt: list[int], output: list[int]) -> LogitRules:
    rules = LogitRules(sampling, np.array(prompt, dtype=np.int32), (EOS,))
    for token_id in output:
        rules.note(token_id)
    return rules


def row_of(seed: int) -> Float32Array:
    return np.random.default_rng(seed).normal(0.0, 3.0, VOCAB).astype(np.float32)


def plainly(
    sampling: SamplingParams, prompt: list[int], output: list[int], row: Float32Array
) -> list[float]:
    """The documented order, one token at a time."""
    changed = [float(value) for value in row]
    for token_id in {*prompt, *output}:
        value = changed[token_id]
        factor = sampling.repetition_penalty
        changed[token_id] = value / factor if value > 0 else value * factor
    for token_id, count in Counter(output).items():
        changed[token_id] -= sampling.frequency_penalty * count
        changed[token_id] -= sampling.presence_penalty
    for token_id, bias in sampling.logit_bias:
        changed[token_id] += bias
    if sampling.allowed_token_ids:
        allowed = set(sampling.allowed_token_ids)
        changed = [value if i in allowed else NEG_INF for i, value in enumerate(changed)]
    if len(output) < sampling.min_tokens:
        for token_id in (EOS, *sampling.stop_token_ids):
            changed[token_id] = NEG_INF
    return changed


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.3},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"logit_bias": ((3, 5.0), (39, -100.0), (0, 0.25))},
        {"allowed_token_ids": (3, 5, 38)},
        {"min_tokens": 5, "stop_token_ids": (7, 8)},
        {
            "frequency_penalty": -0.4,
            "presence_penalty": 2.0,
            "repetition_penalty": 1.1,
            "logit_bias": ((5, 1.0),),
            "allowed_token_ids": tuple(range(0, 40, 3)),
            "min_tokens": 300,
        },
    ],
)
@pytest.mark.parametrize("num_output", [0, 1, 4, 200])
def test_a_changed_row_is_what_the_rules_say(changes: dict[str, Any], num_output: int) -> None:
    sampling = params(**changes)
    assert changes_logits(sampling)
    rng = np.random.default_rng(num_output)
    prompt = rng.integers(0, VOCAB, 12).tolist()
    output = rng.integers(0, VOCAB, num_output).tolist()
    rules = rules_after(sampling, prompt, output)
    row = row_of(num_output)
    before = row.copy()
    changed = rules.apply(row)
    rules.forbid_end(changed)
    assert (row == before).all()
    np.testing.assert_allclose(
        changed, plainly(sampling, prompt, output, row), rtol=1e-4, atol=1e-4
    )


def test_counts_outgrow_their_first_room() -> None:
    rules = LogitRules(params(frequency_penalty=1.0), np.array([1], dtype=np.int32), ())
    tokens = [token_id for token_id in range(300) for _ in range(1 + token_id % 3)]
    for token_id in tokens:
        rules.note(token_id)
    changed = rules.apply(np.zeros(400, dtype=np.float32))
    assert changed.tolist() == [-(1.0 + i % 3) if i < 300 else 0.0 for i in range(400)]


def test_the_end_is_allowed_early_where_nothing_else_is_left() -> None:
    sampling = params(min_tokens=3, allowed_token_ids=(EOS,))
    rules = rules_after(sampling, [1], [])
    [token] = sample(StepLogits(row_of(1)[None]), [sampling], [1], [rules])
    assert token is not None and token.token_id == EOS


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_bias_forces_and_forbids(temperature: float) -> None:
    row = row_of(3)
    favourite = int(row.argmax())
    for seed in range(20):
        forced = params(logit_bias=((11, 100.0),), temperature=temperature, seed=seed)
        barred = params(logit_bias=((favourite, -100.0),), temperature=temperature, seed=seed)
        tokens = sample(
            StepLogits(np.stack([row, row])),
            [forced, barred],
            [4, 4],
            [rules_after(forced, [1], []), rules_after(barred, [1], [])],
        )
        assert tokens[0] is not None and tokens[0].token_id == 11
        assert tokens[1] is not None and tokens[1].token_id != favourite


def test_log_probabilities_are_the_models_own() -> None:
    plain, biased = params(logprobs=3), params(logprobs=3, logit_bias=((11, 100.0),))
    row = row_of(5)
    tokens = sample(
        StepLogits(np.stack([row, row])),
        [plain, biased],
        [0, 0],
        [None, rules_after(biased, [1], [])],
    )
    assert tokens[0] is not None and tokens[1] is not None
    assert tokens[0].logprobs is not None and tokens[1].logprobs is not None
    assert tokens[1].logprobs.top_logprobs == tokens[0].logprobs.top_logprobs
    exact = row.astype(np.float64)
    expected = exact[11] - np.log(np.exp(exact).sum())
    assert tokens[1].logprobs.logprob == pytest.approx(expected, abs=1e-9)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    many = [
        params(temperature=0.8, seed=i, frequency_penalty=0.5, top_p=0.9)
        if i % 2
        else params(temperature=0.8, seed=i)
        for i in range(8)
    ]
    rows = np.stack([row_of(i) for i in range(8)])
    rules = [rules_after(p, [1, 2], [3, 3]) if i % 2 else None for i, p in enumerate(many)]
    together = sample(StepLogits(rows), many, range(8), rules)
    for i in range(8):
        alone = sample(StepLogits(rows[i : i + 1]), [many[i]], [i], [rules[i]])
        assert alone == [together[i]]


@pytest.mark.parametrize(
    "changes",
    [{"presence_penalty": 0.1}, {"logit_bias": ((1, 1.0),)}, {"min_tokens": 1}],
)
def test_rules_need_whole_rows(changes: dict[str, Any]) -> None:
    assert required_top([params(), params(**changes)], VOCAB) == 0
    assert not changes_logits(params())

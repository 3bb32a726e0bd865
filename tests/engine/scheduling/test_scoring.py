"""Prompt log-probabilities: every position is computed, in slices, with the same bits always."""

from itertools import permutations

import msgspec
import pytest

from engine.scheduling import ranking
from engine.types import FinishReason, SamplingParams, TokenLogprobs
from tests.engine.tiny import Answer, Driver, prompt, tiny_core

SCORED = SamplingParams(4, ignore_eos=True, prompt_logprobs=3)
PROMPTS = [prompt(0, 70), prompt(0, 70)[:40] + prompt(1, 90), prompt(2, 33)]


def score(driver: Driver, tokens: list[int], sampling: SamplingParams = SCORED) -> Answer:
    request_id = driver.add(tokens, sampling=sampling)
    driver.run()
    return driver.answers[request_id]


@pytest.fixture(scope="module")
def cold() -> list[list[TokenLogprobs]]:
    driver = Driver(tiny_core())
    scored = []
    for tokens in PROMPTS:
        driver.core.flush()
        scored.append(score(driver, tokens).scored)
    driver.assert_idle()
    return scored


def test_every_token_but_the_first_is_scored_by_those_before_it(
    cold: list[list[TokenLogprobs]],
) -> None:
    """Against the log-probability of the same token, sampled because nothing else is allowed."""
    driver = Driver(tiny_core())
    tokens = PROMPTS[2]
    assert len(cold[2]) == len(tokens) - 1
    for position in (1, 2, 15, 16, 17, 32):
        only = SamplingParams(1, logprobs=3, allowed_token_ids=(tokens[position],))
        answer = score(driver, tokens[:position], only)
        assert answer.tokens == [tokens[position]]
        assert answer.logprobs == [cold[2][position - 1]]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_order_of_requests_changes_no_bit(
    order: tuple[int, ...], cold: list[list[TokenLogprobs]]
) -> None:
    driver = Driver(tiny_core())
    for index in (*order, *order):
        answer = score(driver, PROMPTS[index])
        assert answer.scored == cold[index]
        assert answer.started is not None and answer.started.num_cached_tokens == 0
    driver.assert_idle()


def test_side_by_side_with_others(cold: list[list[TokenLogprobs]]) -> None:
    driver = Driver(tiny_core())
    plain = [driver.add(tokens, 30) for tokens in PROMPTS]
    driver.step()
    scoring = [driver.add(tokens, sampling=SCORED) for tokens in PROMPTS]
    driver.run()
    assert [driver.answers[each].scored for each in scoring] == cold
    for one, other in zip(plain, scoring, strict=True):
        assert driver.answers[one].tokens[:4] == driver.answers[other].tokens
    driver.assert_idle()


def test_scoring_goes_in_slices(
    monkeypatch: pytest.MonkeyPatch, cold: list[list[TokenLogprobs]]
) -> None:
    monkeypatch.setattr(ranking, "MAX_SCORED_ROWS", 9)
    driver = Driver(tiny_core(token_budget=512))
    request_id = driver.add(PROMPTS[1], sampling=SCORED)
    num_before = 0
    while driver.core.has_work:
        driver.step()
        num_scored = len(driver.answers[request_id].scored)
        assert num_scored <= num_before + 9
        num_before = num_scored
    assert driver.answers[request_id].scored == cold[1]


def test_nothing_is_told_twice_after_a_preemption() -> None:
    """Two prompts that fill the pool: the later one gives up its pages while it is scored."""
    alone = Driver(tiny_core())
    longer = msgspec.structs.replace(SCORED, max_tokens=100)
    tokens = [prompt(8, 60), prompt(9, 200)]
    expected = [score(alone, each, longer) for each in tokens]
    driver = Driver(tiny_core(num_pages=20))
    first = driver.add(tokens[0], sampling=longer)
    second = driver.add(tokens[1], sampling=longer)
    driver.run()
    assert driver.core.stats().num_preemptions > 0
    for request_id, answer in zip((first, second), expected, strict=True):
        assert driver.answers[request_id].scored == answer.scored
        assert driver.answers[request_id].tokens == answer.tokens
    driver.assert_idle()


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_a_prompt_may_be_scored_and_nothing_sampled(length: int) -> None:
    driver = Driver(tiny_core())
    answer = score(driver, prompt(4, length), SamplingParams(0, prompt_logprobs=0))
    assert len(answer.scored) == length - 1
    assert all(each.top_ids == () for each in answer.scored)
    assert answer.finished is not None and answer.finished.reason is FinishReason.LENGTH
    assert answer.tokens == []
    driver.assert_idle()


def test_others_take_what_a_scored_prompt_computed() -> None:
    driver = Driver(tiny_core())
    score(driver, PROMPTS[0])
    answer = driver.answer(PROMPTS[0])
    assert answer.started is not None and answer.started.num_cached_tokens == 69


def test_min_tokens_holds_the_end_back() -> None:
    """The tiny model's own end of sequence, made the likeliest token of all."""
    driver = Driver(tiny_core())
    eager = SamplingParams(20, logit_bias=((127, 100.0),))
    assert len(score(driver, PROMPTS[0], eager).tokens) == 1
    patient = msgspec.structs.replace(eager, min_tokens=5)
    answer = score(driver, PROMPTS[0], patient)
    assert len(answer.tokens) == 6 and answer.tokens[-1] == 127
    assert 127 not in answer.tokens[:-1]


def test_penalties_go_on_through_a_preemption() -> None:
    sampling = SamplingParams(
        90, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.2, seed=3, temperature=0.7
    )
    alone = Driver(tiny_core())
    wanted = [prompt(index, 40) for index in range(3)]
    expected = [score(alone, tokens, sampling).tokens for tokens in wanted]
    driver = Driver(tiny_core(num_pages=18))
    ids = [driver.add(tokens, sampling=sampling) for tokens in wanted]
    driver.run()
    assert driver.core.stats().num_preemptions > 0
    assert [driver.answers[each].tokens for each in ids] == expected

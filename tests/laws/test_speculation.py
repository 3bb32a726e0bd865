"""Law: drafts change the time an answer takes, and not a bit of what it is."""

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from engine.types import FinishReason, SamplingParams
from kernels.registry import select_backend
from tests.engine.tiny import EOS, PAGE, Answer, Driver, prompt, tiny_core

FEW = (3, 40, 77)
"""So few tokens to choose from repeat themselves, and not always in the same way."""
GREEDY = SamplingParams(60, ignore_eos=True)
REPEATING = msgspec.structs.replace(GREEDY, allowed_token_ids=FEW)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"allowed_token_ids": FEW},
    {"allowed_token_ids": FEW, "temperature": 1.0, "seed": 5},
    {"allowed_token_ids": FEW, "temperature": 1.5, "seed": 6, "logprobs": 2},
    {"allowed_token_ids": FEW, "temperature": 0.7, "top_k": 2, "seed": 7},
    {"allowed_token_ids": FEW, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": 8},
    {"allowed_token_ids": (*FEW, EOS), "temperature": 1.0, "ignore_eos": False, "seed": 9},
    {"allowed_token_ids": (*FEW, EOS), "ignore_eos": False, "min_tokens": 25, "seed": 2},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"logit_bias": ((3, 4.0), (40, 4.0)), "temperature": 0.5, "seed": 1},
    {"allowed_token_ids": FEW, "temperature": 1.0, "stop": (b"MM(", b"\x03(M\x03("), "seed": 12},
    {"allowed_token_ids": FEW, "stop_token_ids": (77,), "min_tokens": 9, "temperature": 2.0},
    {"allowed_token_ids": FEW, "stop": (b"M",), "min_tokens": 20, "include_stop": True},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "seed": 3},
)


def driver(*, speculation: bool = True, **options: Any) -> Driver:
    """On a clock by which a step takes as long whatever it computes: many drafts, also bad ones."""
    options = {"num_pages": 200, "token_budget": 512, **options}
    selection = select_backend("auto", threads=1, exact=False)
    clock_ns = count(1, 1_000_000).__next__
    core = tiny_core(selection=selection, clock_ns=clock_ns, speculation=speculation, **options)
    core.warm_up()
    return Driver(core)


def assert_same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert one.text == other.text
    assert one.logprobs == other.logprobs
    assert one.scored == other.scored
    assert one.finished is not None and other.finished is not None
    for name in ("reason", "stop", "stop_token_id", "num_output_tokens"):
        assert getattr(one.finished, name) == getattr(other.finished, name)


def alone(run: Driver, tokens: list[int], sampling: SamplingParams) -> Answer:
    request_id = run.add(tokens, sampling=sampling)
    run.run()
    run.assert_idle()
    return run.answers[request_id]


def repetitive(seed: int, length: int) -> list[int]:
    """A prompt of few tokens, so that matches are found from its end on."""
    rng = random.Random(seed)
    return [rng.choice(FEW) for _ in range(length)]


@pytest.fixture(scope="module")
def plain() -> Driver:
    """A step for every token."""
    return driver(speculation=False)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "greedy")
def test_every_way_to_sample(plain: Driver, changes: dict[str, Any]) -> None:
    sampling = msgspec.structs.replace(GREEDY, **changes)
    num_drafts = num_accepted = 0
    for tokens in (prompt(4, 30), repetitive(1, 50), repetitive(2, PAGE), repetitive(3, 200)):
        run = driver()
        assert_same(alone(run, tokens, sampling), alone(plain, tokens, sampling))
        stats = run.core.stats()
        num_drafts += stats.num_draft_tokens
        num_accepted += stats.num_accepted_tokens
    assert num_drafts >= num_accepted
    if "allowed_token_ids" in changes:
        assert num_drafts > 0


def test_steps_are_spared_and_counted() -> None:
    run = driver()
    sampling = msgspec.structs.replace(REPEATING, max_tokens=100)
    answer = alone(run, repetitive(4, 40), sampling)
    stats = run.core.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_steps == 1 + 100 - 1 - stats.num_accepted_tokens
    assert stats.num_computed_tokens == 40 + 100 - 1
    assert answer.finished is not None
    assert answer.finished.num_draft_tokens == stats.num_draft_tokens
    assert answer.finished.num_accepted_tokens == stats.num_accepted_tokens
    work = sum(each.num_tokens for each in stats.work)
    assert work == stats.num_computed_tokens + stats.num_draft_tokens - stats.num_accepted_tokens


@pytest.mark.parametrize("length", range(1, 40))
def test_every_length_ends_where_it_should(plain: Driver, length: int) -> None:
    sampling = msgspec.structs.replace(REPEATING, max_tokens=length)
    run = driver()
    tokens = repetitive(5, 45)
    assert_same(alone(run, tokens, sampling), alone(plain, tokens, sampling))
    # What stays cached is the same too: all but the last token.
    again = alone(run, tokens + run.answers["r1"].tokens, REPEATING)
    assert again.started is not None
    assert again.started.num_cached_tokens == 45 + length - 1


def test_off_drafts_nothing(plain: Driver) -> None:
    alone(plain, repetitive(6, 60), REPEATING)
    assert plain.core.stats().num_draft_tokens == 0


@pytest.mark.parametrize("budget", [1, 7, PAGE - 1, PAGE, PAGE + 1, 64])
@pytest.mark.parametrize("length", [1, 6, PAGE, PAGE + 1, 63, 65])
def test_beside_chunked_prompts(plain: Driver, budget: int, length: int) -> None:
    """vllm-project/vllm#20531, #29821, #15153: a prompt computed in part is taken for a step that
    samples."""
    sampling = msgspec.structs.replace(REPEATING, max_tokens=30, logprobs=1)
    run = driver(token_budget=budget)
    prompts = [repetitive(7, 33), repetitive(8, length), prompt(9, 2 * length)]
    ids = []
    for tokens in prompts:
        ids.append(run.add(tokens, sampling=sampling))
        for _ in range(12):
            run.step()
    run.run()
    run.assert_idle()
    for request_id, tokens in zip(ids, prompts, strict=True):
        assert_same(run.answers[request_id], alone(plain, tokens, sampling))


def test_forks_inside_a_page_while_drafts_are_written(plain: Driver) -> None:
    """Branches read the page that another one writes drafts into."""
    run = driver()
    trunk = repetitive(10, 3 * PAGE + 5)
    alone(run, trunk, msgspec.structs.replace(REPEATING, max_tokens=3))
    branches = [trunk, trunk, *([*trunk, *repetitive(20 + i, 3 * i + 1)] for i in range(3))]
    ids = [run.add(branch, sampling=REPEATING) for branch in branches]
    run.run()
    run.assert_idle()
    assert run.core.stats().num_accepted_tokens > 0
    for branch, request_id in zip(branches, ids, strict=True):
        assert_same(run.answers[request_id], alone(plain, branch, REPEATING))


def test_an_abort_after_any_step_leaves_nothing(plain: Driver) -> None:
    tokens = repetitive(11, 40)
    expected = alone(plain, tokens, REPEATING).tokens
    for num_steps in range(1, 30):
        run = driver()
        request_id = run.add(tokens, sampling=REPEATING)
        for _ in range(num_steps):
            run.step()
        run.core.abort(request_id)
        run.run()
        run.assert_idle()
        said = run.answers[request_id].tokens
        assert said == expected[: len(said)]
        assert_same(alone(run, tokens, REPEATING), alone(plain, tokens, REPEATING))


@pytest.mark.parametrize("credits", [1, 2, 3, 7])
def test_credits_bound_what_comes_at_once(plain: Driver, credits: int) -> None:
    tokens = repetitive(12, 50)
    run = driver()
    request_id = run.add(tokens, sampling=REPEATING, credits=credits)
    answer, given = run.answers[request_id], credits
    while answer.finished is None:
        run.run()
        assert len(answer.tokens) <= given
        if answer.finished is None:
            assert len(answer.tokens) == given, "all credit is used"
            run.core.grant(request_id, credits)
            given += credits
    run.assert_idle()
    assert_same(answer, alone(plain, tokens, REPEATING))


def test_drafts_take_no_pages_from_anybody() -> None:
    """Two streams that fill the pool to its last page: neither gives way for drafts."""
    sampling = msgspec.structs.replace(REPEATING, max_tokens=40)
    for speculation in (False, True):
        run = driver(num_pages=10, max_context=80, speculation=speculation)
        for seed in (1, 2):
            run.add(repetitive(seed, 40), sampling=sampling)
        run.run()
        run.assert_idle()
        assert run.core.stats().num_preemptions == 0
    assert run.core.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_changes_nothing_but_the_time(
    plain: Driver, temperature: float, speculation: bool
) -> None:
    sampling = msgspec.structs.replace(GREEDY, temperature=temperature, seed=1)
    tokens = prompt(13, 40)
    expected = alone(plain, tokens, sampling)
    said = expected.tokens
    for prediction, is_right in (
        (said, True),
        (said[:20], False),
        ([*said, *prompt(14, 20)], True),
        ([*said[:20], (said[20] + 1) % EOS, *said[21:]], False),
        (prompt(15, 300), False),
        ([(said[0] + 1) % EOS], False),
    ):
        run = driver(speculation=speculation)
        request_id = run.add(tokens, sampling=sampling, prediction=prediction)
        run.run()
        run.assert_idle()
        assert_same(run.answers[request_id], expected)
        end = run.answers[request_id].finished
        assert end is not None
        if speculation and is_right:
            assert end.num_accepted_tokens > 40


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens(plain: Driver, seed: int) -> None:
    """Random requests in a pool that is too small, some aborted, some read slowly."""
    rng = random.Random(seed)
    run = driver(
        num_pages=rng.choice([24, 40]),
        max_context=24 * PAGE,
        token_budget=rng.choice([24, 64]),
        decode_token_budget=rng.choice([0, 16]),
        max_running=rng.choice([2, 4, 64]),
    )
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    slow: list[str] = []
    trunk = repetitive(seed, 60)
    for _ in range(10):
        tokens = trunk[: rng.randrange(1, 60)] + repetitive(rng.random().__hash__(), 20)
        sampling = msgspec.structs.replace(GREEDY, **rng.choice(CHANGES), max_tokens=80)
        credits = rng.choice([5, 4096, 4096])
        request_id = run.add(tokens, sampling=sampling, credits=credits)
        asked[request_id] = tokens, sampling
        slow += [request_id] * (credits == 5)
        for _ in range(rng.randrange(8)):
            run.step()
        if rng.random() < 0.2:
            run.core.abort(rng.choice([*asked]))
    _finish(run, slow)
    run.assert_idle()
    assert run.core.stats().num_draft_tokens > 0
    for request_id, (tokens, sampling) in asked.items():
        answer, expected = run.answers[request_id], alone(plain, tokens, sampling)
        assert answer.finished is not None
        if answer.finished.reason is FinishReason.ABORT:
            num_tokens = len(answer.tokens)
            assert answer.tokens == expected.tokens[:num_tokens]
            assert answer.logprobs == expected.logprobs[:num_tokens]
        else:
            assert_same(answer, expected)


def _finish(run: Driver, slow: Sequence[str]) -> None:
    while any(answer.finished is None for answer in run.answers.values()):
        run.run()
        for request_id in slow:
            run.core.grant(request_id, 3)

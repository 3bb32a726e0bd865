"""All laws at once: pools that are too small, aborts, pauses, faults, priorities; each token that
came out equals the token of a lone, cold run."""

import random
from functools import cache

import pytest

from engine.types import FinishReason
from tests.engine.tiny import PAGE, Driver, faulty, prompt, tiny_core
from tests.laws.test_pages import some_prompt

MAX_TOKENS = 90


@cache
def lone(tokens: tuple[int, ...]) -> list[int]:
    return Driver(tiny_core()).answer(list(tokens), MAX_TOKENS).tokens


def soak(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.choice((8, 10, 11, 14, 20, 40))
    run = Driver(
        tiny_core(
            num_pages=num_pages,
            max_context=min(160, num_pages * PAGE),
            token_budget=rng.choice((16, 17, 40, 64, 200)),
            decode_token_budget=rng.choice((4, 16, 33)),
            max_running=rng.choice((1, 2, 4, 64)),
            selection=faulty(set(rng.sample(range(1, 400), rng.choice((0, 0, 5)))).__contains__),
        )
    )
    wanted: dict[str, tuple[list[int], int]] = {}
    live: list[str] = []
    for _ in range(rng.randint(20, 60)):
        if len(live) < 12:
            tokens, max_tokens = some_prompt(rng), rng.randint(0, MAX_TOKENS)
            credits, priority = rng.choice((1, 3, 500)), rng.randint(0, 2)
            request_id = run.add(tokens, max_tokens, credits=credits, priority=priority)
            wanted[request_id] = tokens, max_tokens
            live.append(request_id)
        for request_id in live:
            if rng.random() < 0.1:
                run.core.grant(request_id, rng.randint(1, 9))
        if live and rng.random() < 0.05:
            run.core.abort(rng.choice(live))
        for _ in range(rng.randint(0, 3)):
            run.step()
        live = [request_id for request_id in live if not run.answers[request_id].finished]
    for request_id in live:
        run.core.grant(request_id, 1000)
    run.run(max_steps=6000)
    run.assert_idle()
    for request_id, (tokens, max_tokens) in wanted.items():
        answer = run.answers[request_id]
        assert answer.finished is not None
        assert answer.tokens == lone(tuple(tokens))[: len(answer.tokens)]
        if answer.finished.reason is FinishReason.LENGTH:
            room = run.core.info.max_context - len(tokens)
            assert len(answer.tokens) == min(max_tokens, room)
        elif answer.finished.reason is FinishReason.ERROR:
            assert "injected" in answer.finished.message


@pytest.mark.parametrize("seed", range(6))
def test_a_short_soak(seed: int) -> None:
    soak(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_soak() -> None:
    for seed in range(100, 300):
        soak(seed)


def test_the_answers_differ() -> None:
    """Else the soak would prove nothing."""
    assert len({tuple(lone(tuple(prompt(seed, 20)))) for seed in range(10)}) == 10

"""Law 2: the audit passes after every step (the driver calls it), and nothing stays referenced
when nothing runs."""

import random

import pytest

from engine.types import FinishReason, SamplingParams
from tests.engine.tiny import PAGE, Driver, faulty, prompt, tiny_core

TRUNKS = [prompt(seed, 90) for seed in range(3)]


def some_prompt(rng: random.Random) -> list[int]:
    """Shares a random prefix with others, or all of it, or nothing."""
    trunk = rng.choice(TRUNKS)
    kept = rng.choice((0, 1, PAGE - 1, PAGE, PAGE + 1, 40, 64, 89, 90))
    return (trunk[:kept] + prompt(rng.randint(0, 5), rng.randint(0, 30))) or [1]


@pytest.mark.parametrize("num_pages", [12, 13, 200])
def test_a_thousand_aborts_at_random_steps(num_pages: int) -> None:
    """In pools that preempt, and in one that never does; with priorities and pauses."""
    rng = random.Random(num_pages)
    run = Driver(tiny_core(num_pages=num_pages, max_context=160, token_budget=48, max_running=10))
    live: list[str] = []
    num_aborts = 0
    while num_aborts < 334:
        if len(live) < 10:
            sampling = SamplingParams(rng.randint(0, 30), ignore_eos=True)
            credits = rng.choice((2, 500, 500))
            priority = rng.randint(0, 1)
            live.append(
                run.add(some_prompt(rng), sampling=sampling, priority=priority, credits=credits)
            )
        if rng.random() < 0.15:
            run.core.abort(rng.choice(live))
            num_aborts += 1
        if rng.random() < 0.3:
            run.core.grant(rng.choice(live), rng.randint(1, 4))
        if rng.random() < 0.01:
            run.core.flush()
        run.step()
        live = [request_id for request_id in live if not run.answers[request_id].finished]
    for request_id in live:
        run.core.grant(request_id, 500)
    run.run()
    preempted = run.core.stats().num_preemptions
    assert preempted == 0 if num_pages == 200 else preempted > 0
    run.assert_idle()
    cached = run.core.audit().cached
    assert run.core.flush() == cached
    assert run.core.audit().free == num_pages


def test_faults_at_random_steps_leave_no_page_behind() -> None:
    rng = random.Random(1)
    run = Driver(
        tiny_core(
            num_pages=20, max_context=160, token_budget=48, selection=faulty(lambda n: n % 11 == 0)
        )
    )
    for _ in range(150):
        run.add(some_prompt(rng), rng.randint(0, 20))
        for _ in range(rng.randint(1, 8)):
            run.step()
    run.run()
    run.assert_idle()


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_an_aborted_prefill_leaves_only_what_was_computed(num_steps: int) -> None:
    """The same prompt asked again equals a cold run and reuses no more than completed steps."""
    tokens = prompt(8, 120)
    run = Driver(tiny_core(token_budget=20))
    request_id = run.add(tokens, 6)
    for _ in range(num_steps):
        run.step()
    computed = run.core.stats().num_computed_tokens
    run.core.abort(request_id)
    run.step()
    again = run.answer(tokens, 6)
    assert again.started is not None
    whole = min(computed, 120) // PAGE * PAGE
    assert again.started.num_cached_tokens == whole
    assert again.tokens == Driver(tiny_core()).answer(tokens, 6).tokens
    run.assert_idle()


def test_a_finished_request_leaves_its_tail() -> None:
    """All computed tokens, the last partial page too; the last sampled token was not computed."""
    run = Driver(tiny_core())
    first = run.answer(prompt(1, 21), 7)
    longer = run.answer(prompt(1, 21) + first.tokens + [3], 2)
    assert longer.started is not None
    assert longer.started.num_cached_tokens == 21 + 7 - 1


def test_tenants_and_salts_share_nothing() -> None:
    run = Driver(tiny_core())
    run.answer(prompt(1, 50), 2)
    other = run.add(prompt(1, 50), 2, tenant="other")
    run.run()
    started = run.answers[other].started
    assert started is not None and started.num_cached_tokens == 0
    end = run.answers[other].finished
    assert end is not None and end.reason is FinishReason.LENGTH
    run.assert_idle()

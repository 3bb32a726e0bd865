"""Requests that arrive together compute what they share once."""

import pytest

from engine.types import Finished, FinishReason, Started
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def cached(run: Driver, request_id: str) -> int:
    started = run.answers[request_id].started
    assert started is not None
    return started.num_cached_tokens


@pytest.mark.parametrize("length", [199, 200, 208, 209])
def test_eight_twins_compute_a_cold_prompt_once(length: int) -> None:
    run = Driver(tiny_core(token_budget=128, decode_token_budget=128))
    ids = [run.add(prompt(1, length), 3) for _ in range(8)]
    run.run()
    assert [cached(run, i) for i in ids] == [0] + [length - 1] * 7
    assert run.core.stats().num_computed_tokens == length + 7 + 8 * 2
    assert len({tuple(run.answers[i].tokens) for i in ids}) == 1
    run.assert_idle()


def test_a_shared_beginning_is_computed_once_and_then_they_go_on() -> None:
    trunk = prompt(1, 10 * PAGE)
    run = Driver(tiny_core(token_budget=32))
    ids = [run.add(trunk + prompt(10 + i, 200), 2) for i in range(4)]
    started: dict[str, int] = {}
    for step in range(200):
        for event in run.step():
            if isinstance(event, Started):
                started[event.request_id] = step
    assert [cached(run, i) for i in ids] == [0, *[10 * PAGE] * 3]
    assert started[ids[1]] == 11, "360 tokens at 32 a step, then there is room for the next"
    run.assert_idle()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_the_next_takes_over_when_the_leader_is_aborted(num_steps: int) -> None:
    tokens = prompt(1, 200)
    run = Driver(tiny_core(token_budget=40))
    leader, *followers = [run.add(tokens, 3) for _ in range(4)]
    for _ in range(num_steps):
        run.step()
    assert all(run.answers[i].started is None for i in followers)
    run.core.abort(leader)
    run.run()
    inherited = num_steps * 40 // PAGE * PAGE
    computed = inherited  # by the first follower, until the others may take what is there
    while computed < 192:
        computed = min(computed + 40, 199)
    assert [cached(run, i) for i in followers] == [inherited, computed, computed]
    reasons = {end.reason for i in followers if (end := run.answers[i].finished)}
    assert reasons == {FinishReason.LENGTH}
    run.assert_idle()


def test_the_next_takes_over_when_the_leader_is_preempted() -> None:
    """An earlier, growing one takes the leader's pages; leader and follower end all the same."""
    run = Driver(tiny_core(num_pages=12, max_context=12 * PAGE, token_budget=16))
    first = run.add(prompt(9, 30), 120)
    run.step()
    run.step()
    twins = [run.add(prompt(1, 110), 30) for _ in range(2)]
    run.run()
    ends = [run.answers[i].finished for i in (first, *twins)]
    assert all(isinstance(e, Finished) and e.reason is FinishReason.LENGTH for e in ends)
    assert run.answers[twins[0]].tokens == run.answers[twins[1]].tokens
    run.assert_idle()


def test_others_are_not_held_up_behind_followers() -> None:
    run = Driver(tiny_core(token_budget=32))
    run.add(prompt(1, 200), 2)
    follower = run.add(prompt(1, 200), 2)
    other = run.add(prompt(2, 10), 2)
    run.step()
    assert run.answers[other].started is not None
    assert run.answers[follower].started is None
    run.run()
    run.assert_idle()


def test_tenants_do_not_follow_each_other() -> None:
    run = Driver(tiny_core(token_budget=200))
    ids = [run.add(prompt(1, 100), 2, tenant=tenant) for tenant in ("a", "b")]
    run.step()
    assert all(run.answers[i].started is not None for i in ids)
    run.run()
    assert [cached(run, i) for i in ids] == [0, 0]

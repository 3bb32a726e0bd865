"""Who joins: urgency, fairness between tenants, cached prefixes, and nobody waits for ever."""

import pytest

from engine.types import Started
from tests.engine.scheduling.simulated import Machine, Simulation
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def started(run: Simulation) -> list[str]:
    """All requests in the order of their admission."""
    order: list[str] = []
    while run.core.has_work:
        order += [event.request_id for event in run.step() if isinstance(event, Started)]
    return order


def test_a_short_prompt_does_not_queue_behind_long_ones() -> None:
    """Its time to the first token under a flood is three times what it would be alone, at most."""

    def ttft_ms(num_long: int) -> float:
        run = Simulation(itl_target_ms=40.0)
        run.add(50, 5000)
        run.run_for(500)
        for _ in range(num_long):
            run.add(6000, 1)
        run.run_for(500)
        short = run.add(100, 1)
        run.run_until_first_token(short)
        return run.lives[short].ttft_ms

    assert ttft_ms(20) < 3 * ttft_ms(0)


def test_nor_behind_one_beside_which_the_target_has_no_place_for_another_like_it() -> None:
    """A place is what a stream will cost, not what the long one will."""
    run = Simulation(itl_target_ms=10.0)
    run.core.warm_up()
    long = run.add(6000, 60)
    for _ in range(20):
        run.step()
    short = [run.add(30, 60) for _ in range(2)]
    run.run()
    assert all(run.lives[name].ttft_ms < 150 for name in short)
    assert run.lives[long].finished


def test_nor_behind_one_whose_promise_is_lost() -> None:
    run = Simulation(ttft_target_ms=300.0)
    long = run.add(6000, 1)
    run.run_for(350)
    short = run.add(60, 1)
    run.run_until_first_token(short)
    assert run.lives[short].ttft_ms < 1000
    assert not run.lives[long].token_ns


def test_a_long_prompt_keeps_half_of_its_speed_beside_short_ones() -> None:
    def ttft_ms(pause_ms: float) -> float:
        run = Simulation()
        long = run.add(6000, 1)
        next_ms = run.now_ms
        while not run.lives[long].token_ns:
            while run.now_ms >= next_ms:
                run.add(200, 1)
                next_ms += pause_ms
            run.step()
        return run.lives[long].ttft_ms

    assert ttft_ms(10.0) < 2.3 * ttft_ms(1e9)


def test_tenants_share_by_tokens_however_many_requests_they_send() -> None:
    run = Simulation(max_running=8)
    for _ in range(200):
        run.add(300, 20, tenant="greedy")
    modest = [run.add(300, 20, tenant="modest") for _ in range(20)]
    run.run()
    last = max(run.lives[name].token_ns[-1] for name in modest)
    all_ns = max(life.token_ns[-1] for life in run.lives.values())
    begun_ns = run.lives["r0"].added_ns
    assert last - begun_ns < 0.25 * (all_ns - begun_ns), "40 of 220 were served by then"


def test_weights_divide_the_service() -> None:
    run = Simulation(max_running=4)
    for _ in range(100):
        run.add(300, 10, tenant="one", weight=1.0)
        run.add(300, 10, tenant="three", weight=3.0)
    order = started(run)
    first = order[:80]
    three = sum(int(name[1:]) % 2 for name in first)
    assert 54 <= three <= 66, "three of four"


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    run = Simulation(max_running=2)
    early = run.add(100, 5, tenant="sleeper")
    for _ in range(60):
        run.add(300, 5, tenant="steady")
    run.run_until_first_token(early)
    run.run_for(4000)
    for _ in range(60):
        run.add(300, 5, tenant="sleeper")
    order = started(run)[:20]
    assert 7 <= sum(int(name[1:]) > 60 for name in order) <= 13, "turn about, no rush"


def test_urgent_ones_go_first_whatever_their_tenant_has_had() -> None:
    run = Simulation(max_running=1)
    for _ in range(5):
        run.add(300, 5, tenant="other")
    run.run_for(400)
    urgent = run.add(300, 5, tenant="other", priority=-1)
    run.add(300, 5, tenant="new")
    assert started(run)[0] == urgent


def test_the_longest_cached_prefix_goes_first_among_those_that_came_together() -> None:
    run = Simulation(max_running=1)
    trunk = run.tokens(800)
    run.add(trunk, 1)
    run.run()
    busy = run.add(100, 30)
    run.run_until_first_token(busy)
    names = [
        run.add(1000, 1),
        run.add(trunk[:400] + run.tokens(600), 1),
        run.add(trunk + run.tokens(200), 1),
    ]
    assert started(run) == names[::-1]


def test_ageing_bounds_how_long_warm_ones_go_first() -> None:
    """A cold prompt beside an endless row of warm ones waits about as long as they save."""
    run = Simulation(max_running=1)
    trunk = run.tokens(2000)
    run.add(trunk, 1)
    run.run()
    run.add(100, 5)
    cold = run.add(2000, 1)
    while not run.lives[cold].started_ns:
        if len(run.core._scheduler.waiting) < 4:
            run.add(trunk + run.tokens(20), 5)
        run.step()
    waited_ms = (run.lives[cold].started_ns - run.lives[cold].added_ns) / 1e6
    assert waited_ms < 2.5 * 2000 * Machine().token


def test_one_that_does_not_fit_does_not_block_smaller_ones() -> None:
    run = Simulation(num_pages=100)
    run.add(60 * PAGE, 400)
    run.run_for(800)
    large = run.add(70 * PAGE, 1)
    small = [run.add(5 * PAGE, 1) for _ in range(4)]
    run.run_for(300)
    assert all(run.lives[name].finished for name in small)
    assert not run.lives[large].started_ns
    run.run()
    assert run.lives[large].finished is not None


def test_small_ones_do_not_pass_for_ever() -> None:
    """Once they took as many tokens as the pool has, they wait behind the large one."""
    run = Simulation(num_pages=100, max_running=8)
    large = ""
    num_after = 0
    for i in range(400):
        if i == 20:
            large = run.add(90 * PAGE, 1)
        run.add(20 * PAGE, 10)
        run.run_for(30)
        if large and run.lives[large].started_ns:
            break
        num_after += bool(large)
    assert num_after < 110


def test_an_urgent_follower_lifts_its_leader() -> None:
    """It waits for a prefix that a request of the lowest urgency computes, beside a flood."""
    run = Simulation()
    trunk = run.tokens(4000)
    run.add(trunk, 1, priority=5)
    run.run_for(300)
    urgent = run.add(trunk + run.tokens(50), 1, priority=-1)
    for _ in range(40):
        run.add(2000, 1, priority=0)
    run.run_until_first_token(urgent)
    assert run.lives[urgent].ttft_ms < 5000
    assert sum(life.finished is not None for life in run.lives.values()) <= 3


@pytest.mark.parametrize("num", [300])
def test_a_look_at_a_long_queue_is_bounded(num: int) -> None:
    run = Simulation(max_running=1)
    run.add(100, 300)
    for i in range(num):
        run.add(100, 1, tenant=f"t{i % 30}")
    waiting = run.core._scheduler.waiting
    assert len(waiting.look(lambda tenant: 0.0, lambda request: True)) <= 8 * 24
    assert len(waiting) == len(list(waiting)) == num + 1
    assert waiting.num_tokens == 100 * (num + 1)


def test_a_fork_of_a_running_response_takes_its_half_filled_page_too() -> None:
    run = Driver(tiny_core())
    trunk = run.add(prompt(1, 2 * PAGE), 100)
    for _ in range(12):
        run.step()
    so_far = prompt(1, 2 * PAGE) + run.answers[trunk].tokens[:9]
    fork = run.add([*so_far, 5], 4)
    run.step()
    begun = run.answers[fork].started
    assert begun is not None and begun.num_cached_tokens == len(so_far)
    run.run()
    cold = Driver(tiny_core()).answer([*so_far, 5], 4)
    assert run.answers[fork].tokens == cold.tokens
    assert run.answers[trunk].tokens == Driver(tiny_core()).answer(prompt(1, 2 * PAGE), 100).tokens
    run.assert_idle()

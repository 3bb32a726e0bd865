"""Pages run out: who has the least to lose gives up its pages, three times at most, and nothing is
lost."""

import random

import pytest

from engine.types import FinishReason, SamplingParams, TokenDelta
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def lone(tokens: list[int], max_tokens: int) -> list[int]:
    return Driver(tiny_core()).answer(tokens, max_tokens).tokens


def preemptions(run: Driver) -> int:
    """The most of any request."""
    return max(end.num_preemptions for a in run.answers.values() if (end := a.finished))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(150, 10), (80, 80), (20, 140)], ids=["prompt", "half", "output"]
)
def test_three_that_exceed_the_pool_by_a_fifth_all_finish(num_prompt: int, max_tokens: int) -> None:
    """3 x 10 pages in a pool of 25. Recomputed tokens stay below the prompts' tokens. After
    vllm-project/vllm#18115, where they preempted each other for ever."""
    run = Driver(tiny_core(num_pages=25))
    assert 3 * (num_prompt + max_tokens) == 1.2 * 25 * PAGE
    ids = [run.add(prompt(i, num_prompt), max_tokens) for i in range(3)]
    run.run(max_steps=800)
    for i, request_id in enumerate(ids):
        assert run.answers[request_id].tokens == lone(prompt(i, num_prompt), max_tokens)
    recomputed = run.core.stats().num_computed_tokens - 3 * (num_prompt + max_tokens - 1)
    assert preemptions(run) <= 3
    assert 0 <= recomputed <= 3 * num_prompt
    assert (num_prompt < 150) <= run.core.stats().num_preemptions <= 3, "prompts need not begin"
    run.assert_idle()


def test_the_latest_of_the_lowest_priority_gives_way() -> None:
    run = Driver(tiny_core(num_pages=12, max_context=12 * PAGE))
    ids = [run.add(prompt(i, 30), 100, priority=priority) for i, priority in enumerate((1, 0, 0))]
    run.run()
    preemptions = {
        request_id: end.num_preemptions
        for request_id in ids
        if (end := run.answers[request_id].finished)
    }
    assert preemptions[ids[0]] > 0, "the least urgent one, though it came first"
    assert preemptions[ids[1]] == 0, "the first in order never gives way"
    ends = [run.answers[i].finished for i in ids]
    times = [end.time_ns for end in ends if end]
    assert times[1] < times[2] < times[0]
    run.assert_idle()


def test_32_in_a_pool_that_is_far_too_small() -> None:
    """Always somebody moves, nobody starves, and the work done twice is bounded."""
    run = Driver(tiny_core(num_pages=20, max_context=10 * PAGE, token_budget=64))
    wanted = [(prompt(i, 20 + 3 * i), 40) for i in range(32)]
    ids = [run.add(*want) for want in wanted]
    run.run(max_steps=3000)
    for request_id, (tokens, max_tokens) in zip(ids, wanted, strict=True):
        assert run.answers[request_id].tokens == lone(tokens, max_tokens)
    needed = sum(len(tokens) + max_tokens - 1 for tokens, max_tokens in wanted)
    assert run.core.stats().num_computed_tokens <= 2 * needed
    assert preemptions(run) <= 3
    run.assert_idle()


def test_one_page_too_few_costs_one_victim_at_a_time() -> None:
    """32 that need a page each at the same time, of which one is missing. After
    vllm-project/vllm-ascend#16315, where one missing page made everybody give way."""
    num_prompt, max_tokens = PAGE - 2, PAGE
    budget = 32 * PAGE
    run = Driver(tiny_core(num_pages=63, token_budget=budget, decode_token_budget=budget))
    ids = [run.add(prompt(i, num_prompt), max_tokens) for i in range(32)]
    before, steps_without_tokens = run.core.stats(), 0
    while run.core.has_work:
        run.step()
        now = run.core.stats()
        assert now.num_preemptions - before.num_preemptions <= 1
        steps_without_tokens += now.num_output_tokens == before.num_output_tokens
        before = now
    assert 1 <= before.num_preemptions <= 2
    assert steps_without_tokens <= 1, "it stood still"
    for i, request_id in enumerate(ids):
        assert run.answers[request_id].tokens == lone(prompt(i, num_prompt), max_tokens)
    run.assert_idle()


def test_a_preempted_request_keeps_its_start_and_its_tokens() -> None:
    """One Started, one count of cached tokens, phases that cover the whole way."""
    run = Driver(tiny_core(num_pages=10, max_context=10 * PAGE))
    first = run.add(prompt(1, 40), 80)
    second = run.add(prompt(2, 40), 80)
    run.run()
    end = run.answers[second].finished
    assert end is not None and end.num_preemptions > 0
    assert run.answers[first].finished is not None
    assert end.num_cached_tokens == 0
    names = [phase.name for phase in end.phases]
    assert names[:3] == ["queue", "prefix_match", "prefill"]
    assert names.count("queue") == end.num_preemptions + 1
    run.assert_idle()


@pytest.mark.parametrize("matched", [6 * PAGE - 5, 6 * PAGE - 1])
def test_a_whole_pool_with_a_tail_that_cannot_be_copied(matched: int) -> None:
    """The match needs every page but the copy of the last one; nothing else runs: it is computed
    without that page, not refused and not waited for."""
    run = Driver(tiny_core(num_pages=6, max_context=6 * PAGE))
    trunk = prompt(1, matched)
    run.answer(trunk, 1)
    run.answer(trunk[:-3] + [t % 100 + 1 for t in trunk[-3:]], 1)
    answer = run.answer(trunk[:-3], 6 * PAGE)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.tokens == lone(trunk[:-3], 6 * PAGE - matched + 3)
    run.assert_idle()


def test_a_large_one_at_the_head_is_not_starved_by_small_ones() -> None:
    run = Driver(tiny_core(num_pages=12, max_context=12 * PAGE))
    run.add(prompt(0, 60), 20)
    large = run.add(prompt(1, 170), 5)
    for i in range(40):
        run.add(prompt(10 + i, 30), 5)
        run.step()
    assert run.answers[large].finished is not None
    run.run()
    run.assert_idle()


def test_a_paused_one_gives_up_its_slot_and_goes_on_later() -> None:
    """A reader that takes nothing holds up nobody, not even as the first in order; where its
    pages stay cached, the partly filled last one too, nothing of it is computed twice."""
    run = Driver(tiny_core(max_running=1))
    sampling = SamplingParams(60, ignore_eos=True)
    paused = run.add(prompt(1, 90), sampling=sampling, credits=4)
    others = [run.add(prompt(2 + i, 90), sampling=sampling) for i in range(3)]
    run.run()
    assert all(run.answers[i].finished for i in others)
    assert run.answers[paused].finished is None
    assert len(run.answers[paused].tokens) == 4
    run.core.grant(paused, 100)
    run.run()
    assert run.answers[paused].tokens == lone(prompt(1, 90), 60)
    assert run.core.stats().num_computed_tokens == 4 * (90 + 60 - 1)
    run.assert_idle()


def test_a_paused_one_gives_up_its_pages_before_those_that_move() -> None:
    run = Driver(tiny_core(num_pages=10, max_context=10 * PAGE))
    paused = run.add(prompt(1, 90), 20, credits=2)
    moving = run.add(prompt(2, 20), 120)
    run.run()
    end = run.answers[moving].finished
    assert end is not None and end.num_preemptions == 0
    assert run.answers[paused].finished is None
    run.core.grant(paused, 100)
    run.run()
    assert run.answers[paused].tokens == lone(prompt(1, 90), 20)
    run.assert_idle()


def test_case_43_a_pool_too_small_by_a_page_is_no_cascade() -> None:
    """32 that run, and one page is missing: one victim, and all others get a token in each step."""
    run = Driver(tiny_core(num_pages=95, max_context=400, decode_token_budget=64))
    ids = [run.add(prompt(i, PAGE + 2), 2 * PAGE - 3) for i in range(32)]
    while run.core.has_work:
        before = run.core.stats()
        moved = {event.request_id for event in run.step() if isinstance(event, TokenDelta)}
        after = run.core.stats()
        assert moved or after.num_computed_tokens > before.num_computed_tokens
        assert after.num_preemptions - before.num_preemptions <= 1
    assert run.core.stats().num_preemptions <= 2
    assert all(run.answers[i].tokens == lone(prompt(n, PAGE + 2), 29) for n, i in enumerate(ids))
    run.assert_idle()


def test_the_victim_is_who_has_the_least_to_compute_again() -> None:
    """Not the one with the fewest tokens: what others keep anyway is no loss."""
    trunk = prompt(9, 6 * PAGE)
    run = Driver(tiny_core(num_pages=22, max_context=22 * PAGE))
    holder = run.add(trunk, 60)
    run.step()
    run.step()
    sharer = run.add([*trunk, 1, 2, 3], 60)
    alone = run.add(prompt(1, 5 * PAGE), 60)
    grower = run.add(prompt(2, PAGE), 100)
    run.run()
    counts = {
        name: end.num_preemptions
        for name in (holder, sharer, alone, grower)
        if (end := run.answers[name].finished)
    }
    assert counts[sharer] > 0 and counts[alone] == 0
    run.assert_idle()


@pytest.mark.parametrize("seed", range(3))
def test_demand_far_beyond_the_pool_ends_all_the_same(seed: int) -> None:
    """Random lengths, priorities and arrivals: every request ends, moves are never made in vain,
    and what settled ones reserved is there when they need it."""
    rng = random.Random(seed)
    run = Driver(tiny_core(num_pages=16, max_context=14 * PAGE, token_budget=64))
    wanted: dict[str, tuple[int, int, int]] = {}
    for i in range(30):
        length, most = rng.randint(1, 90), rng.randint(1, 130)
        wanted[run.add(prompt(i, length), most, priority=rng.randint(0, 2))] = (i, length, most)
        for _ in range(rng.randint(0, 6)):
            run.step()
    idle = 0
    while run.core.has_work:
        before = run.core.stats().num_computed_tokens
        run.step()
        idle = 0 if run.core.stats().num_computed_tokens > before else idle + 1
        assert idle <= 3, "nothing moves"
    for name, (i, length, most) in wanted.items():
        assert run.answers[name].tokens == lone(prompt(i, length), most)
    assert 0 < preemptions(run) <= 3
    run.assert_idle()

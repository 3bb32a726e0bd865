"""Pages run out: the last in order gives up its pages and nothing is lost."""

import pytest

from engine.types import FinishReason, SamplingParams
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def lone(tokens: list[int], max_tokens: int) -> list[int]:
    return Driver(tiny_core()).answer(tokens, max_tokens).tokens


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(150, 10), (80, 80), (20, 140)], ids=["prompt", "half", "output"]
)
def test_three_that_exceed_the_pool_by_a_fifth_all_finish(num_prompt: int, max_tokens: int) -> None:
    """3 x 10 pages in a pool of 25. Recomputed tokens stay below the prompts' tokens."""
    run = Driver(tiny_core(num_pages=25))
    ids = [run.add(prompt(i, num_prompt), max_tokens) for i in range(3)]
    run.run(max_steps=800)
    for i, request_id in enumerate(ids):
        assert run.answers[request_id].tokens == lone(prompt(i, num_prompt), max_tokens)
    recomputed = run.core.stats().num_computed_tokens - 3 * (num_prompt + max_tokens - 1)
    assert 0 <= recomputed <= 3 * num_prompt
    assert run.core.stats().num_preemptions <= 3
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

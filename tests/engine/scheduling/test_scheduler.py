"""Who computes how much in a step: decodes first, prefills side by side, order, slots, credits."""

from collections.abc import Callable

import pytest

from engine.core import MeanwhileFailed
from engine.types import EngineEvent, Finished, FinishReason, SamplingParams, Started, TokenDelta
from kernels.contract import ForwardBatch, StepLogits, do_nothing
from kernels.registry import Selection
from tests.engine.scheduling.simulated import Simulation
from tests.engine.tiny import PAGE, Driver, FaultyBackend, faulty, prompt, tiny_core


def computed(run: Driver) -> int:
    return run.core.stats().num_computed_tokens


def tokens_of(events: list[EngineEvent]) -> dict[str, int]:
    return {e.request_id: len(e.token_ids) // 4 for e in events if isinstance(e, TokenDelta)}


def test_the_budget_shrinks_while_others_decode() -> None:
    run = Driver(tiny_core(token_budget=64, decode_token_budget=32))
    stream = run.add(prompt(1, 10), 100)
    run.step()
    long = run.add(prompt(2, 300), 2)
    for _ in range(4):
        before = computed(run)
        assert tokens_of(run.step()) == {stream: 1}
        assert computed(run) - before == 32
    run.core.abort(stream)
    before = computed(run)
    run.step()
    assert computed(run) - before == 64
    run.run()
    assert run.answers[long].finished is not None
    run.assert_idle()


def test_a_running_stream_gets_a_token_in_every_step() -> None:
    run = Driver(tiny_core(num_pages=200))
    stream = run.add(prompt(1, 10), 60)
    run.step()
    for i in range(40):
        run.add(prompt(2 + i, 60), 1)
        assert tokens_of(run.step())[stream] == 1
    run.run()
    run.assert_idle()


def test_prefills_move_by_a_page_however_many_decode() -> None:
    run = Driver(tiny_core(num_pages=200, decode_token_budget=8))
    for i in range(20):
        run.add(prompt(i, 5), 60)
    while not all(answer.tokens for answer in run.answers.values()):
        run.step()
    assert run.core.stats().running == 20
    late = run.add(prompt(99, 3 * PAGE), 1)
    for _ in range(3):
        run.step()
    assert run.answers[late].finished is not None
    run.run()
    run.assert_idle()


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    run = Driver(tiny_core(token_budget=64))
    long = run.add(prompt(1, 400), 1)
    short = run.add(prompt(2, 20), 1)
    events = run.step()
    assert {e.request_id for e in events if isinstance(e, Started)} == {long, short}
    assert run.answers[short].finished is not None
    assert computed(run) == 64
    run.run()
    run.assert_idle()


def test_at_most_max_running_in_order_of_priority_then_arrival() -> None:
    run = Driver(tiny_core(max_running=2, token_budget=16))
    ids = [run.add(prompt(i, 20), 3, priority=priority) for i, priority in enumerate((1, 1, 0, 1))]
    order: list[str] = []
    while run.core.has_work:
        order += [e.request_id for e in run.step() if isinstance(e, Started)]
        assert run.core.stats().running <= 2
    assert order == [ids[2], ids[0], ids[1], ids[3]]
    run.assert_idle()


def test_without_credit_a_request_pauses_alone_and_loses_nothing() -> None:
    run = Driver(tiny_core())
    expected = run.answer(prompt(1, 30), 20)
    paused = run.add(prompt(1, 30), 20, credits=3)
    other = run.add(prompt(2, 30), 50)
    run.run()
    assert run.answers[other].finished is not None
    assert run.answers[paused].tokens == expected.tokens[:3]
    assert not run.core.has_work
    assert run.step() == []
    for granted in (1, 2, 5, 1):
        had = len(run.answers[paused].tokens)
        run.core.grant(paused, granted)
        run.run()
        assert len(run.answers[paused].tokens) == had + granted
    run.core.grant(paused, 1000)
    run.run()
    assert run.answers[paused].tokens == expected.tokens
    assert run.answers[paused].text == expected.text
    run.core.grant(paused, 5)
    run.core.grant("never heard of", 5)
    run.assert_idle()


def test_the_last_token_needs_no_further_credit_to_end() -> None:
    run = Driver(tiny_core())
    request_id = run.add(prompt(1, 30), 4, credits=4)
    run.run()
    end = run.answers[request_id].finished
    assert end is not None and end.reason is FinishReason.LENGTH


def test_a_paused_request_keeps_its_pages_and_can_be_aborted() -> None:
    run = Driver(tiny_core())
    paused = run.add(prompt(1, 30), 20, credits=2)
    run.run()
    assert run.core.stats().pool.referenced == 2
    run.core.abort(paused)
    assert run.core.has_work
    [end] = run.step()
    assert isinstance(end, Finished) and end.reason is FinishReason.ABORT
    run.assert_idle()


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_prompt_plus_cache_is_conserved(length: int) -> None:
    """Prompt tokens are either cached or computed, at every boundary, cold and warm."""
    run = Driver(tiny_core())
    for attempt in range(2):
        before = computed(run)
        answer = run.answer(prompt(1, length), 1)
        assert answer.started is not None
        assert answer.started.num_cached_tokens + computed(run) - before == length
        assert answer.started.num_cached_tokens == (length - 1 if attempt else 0)


class _Recording(FaultyBackend):
    """Keeps the batches it stepped."""

    batches: list[ForwardBatch]

    def step(
        self,
        model: object,
        kv: object,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        self.batches.append(batch)
        return self._backend.step(model, kv, batch, meanwhile)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1])
def test_a_full_match_computes_one_token_and_writes_nothing(length: int) -> None:
    real = faulty(lambda step: False)
    backend = _Recording(real.backend, lambda step: False)
    backend.batches = []
    run = Driver(tiny_core(selection=Selection(backend, real.name, real.reason)))
    run.answer(prompt(1, length), 1)
    backend.batches.clear()
    run.answer(prompt(1, length), 3)
    first, second, _ = backend.batches
    assert first.positions.tolist() == [length - 1]
    assert first.slot_mapping.tolist() == [-1]
    assert second.positions.tolist() == [length]
    assert second.slot_mapping.min() >= 0


def test_phases_tell_each_chunk() -> None:
    run = Driver(tiny_core(token_budget=40))
    end = run.answer(prompt(1, 100), 6).finished
    assert end is not None
    assert [(p.name, p.start_position, p.num_tokens) for p in end.phases] == [
        ("queue", 0, 0),
        ("prefix_match", 0, 0),
        ("prefill", 0, 40),
        ("prefill", 40, 40),
        ("prefill", 80, 20),
        ("decode", 100, 5),
    ]
    warm = run.answer(prompt(1, 100) + prompt(2, 10), 1).finished
    assert warm is not None
    assert [(p.name, p.start_position, p.num_tokens) for p in warm.phases] == [
        ("queue", 0, 0),
        ("prefix_match", 0, 100),
        ("prefill", 100, 10),
    ]


def test_credits_bound_what_is_sent_also_through_preemption() -> None:
    sampling = SamplingParams(60, ignore_eos=True)
    run = Driver(tiny_core(num_pages=10, max_context=10 * PAGE))
    ids = [run.add(prompt(i, 40), sampling=sampling, credits=7 + i) for i in range(3)]
    run.run()
    for i, request_id in enumerate(ids):
        assert len(run.answers[request_id].tokens) == 7 + i
    while any(run.answers[i].finished is None for i in ids):
        for request_id in ids:
            run.core.grant(request_id, 3)
        run.run()
    for i, request_id in enumerate(ids):
        assert run.answers[request_id].tokens == (
            Driver(tiny_core()).answer(prompt(i, 40), 60).tokens
        )
    run.assert_idle()


def test_what_fails_meanwhile_is_no_fault_of_the_step() -> None:
    """The loop ends then, and tells all; the requests are not told that their step failed."""
    run = Driver(tiny_core())
    run.add(prompt(1, 20), 4)

    def fail() -> None:
        raise OSError("the border broke")

    with pytest.raises(MeanwhileFailed, match="the border broke"):
        run.core.step(fail)
    assert run.core.stats().running == 1
    run.core.audit()


def test_what_warms_up_writes_where_the_first_request_will() -> None:
    """Memory is touched as far as was written: the pool's last page would be all of it."""
    run = Simulation(num_pages=64)
    run.core.warm_up()
    warmed = max(int(batch.slot_mapping.max()) for batch in run.backend.batches)
    run.backend.batches.clear()
    run.add(129)
    run.run()
    assert max(int(batch.slot_mapping.max()) for batch in run.backend.batches) == warmed

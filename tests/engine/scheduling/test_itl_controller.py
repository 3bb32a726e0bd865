"""What a target promises, on a machine whose costs the controller has to find out."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.scheduling.itl_controller import ItlController
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.types import Started
from tests.engine.scheduling.simulated import Machine, Simulation

LONE_ITL_MS = 5.9
"""Four streams of the default machine."""


def gaps_since(run: Simulation, streams: list[str], since_ns: int) -> NDArray[np.float64]:
    times = [np.array(run.lives[name].token_ns) for name in streams]
    return np.concatenate([np.diff(t)[t[:-1] >= since_ns] for t in times]) / 1e6


def with_streams(
    num: int = 4, machine: Machine | None = None, *, warm: bool = False, **config: Any
) -> Simulation:
    """A core with so many streams that have run for a second."""
    run = Simulation(machine, **config)
    if warm:
        run.core.warm_up()
    for _ in range(num):
        run.add(60, 20_000)
    run.run_for(1000)
    return run


def lone_ttft_ms(prompt: int, machine: Machine | None = None) -> float:
    run = Simulation(machine)
    run.add(2000, 1)
    run.run()  # its costs are known then
    name = run.add(prompt, 1)
    run.run()
    return run.lives[name].ttft_ms


@pytest.mark.parametrize("spread", [0.03, 0.15])
@pytest.mark.parametrize("factor", [3, 4, 6])
def test_the_target_is_kept_beside_a_long_prompt(factor: float, spread: float) -> None:
    """And the prompt gets what the target leaves: nothing waits to meet it."""
    machine = Machine(spread=spread)
    target_ms = factor * LONE_ITL_MS
    run = with_streams(machine=machine, itl_target_ms=target_ms)
    begun_ns = run.backend.now_ns
    prompt = run.add(6000, 1)
    run.run_until_first_token(prompt)
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert np.percentile(gaps, 95) <= 1.1 * target_ms
    assert np.percentile(gaps, 99) <= 1.5 * target_ms
    assert gaps.max() <= 3 * target_ms
    share = lone_ttft_ms(6000, machine) / run.lives[prompt].ttft_ms
    taken_ms = LONE_ITL_MS + 4  # the streams' contexts grow meanwhile
    taken_ms += 3000 * machine.key  # and each chunk reads what is behind it
    late = np.exp(1.645 * spread)  # what one step in twenty takes longer than expected
    assert share > 0.75 * (1 - taken_ms * late / target_ms)


def test_where_the_target_leaves_little_a_few_steps_are_long() -> None:
    """Four in a hundred take one and a half targets, and nineteen in twenty stay below it."""
    target_ms = 1.6 * LONE_ITL_MS
    run = with_streams(itl_target_ms=target_ms)
    begun_ns = run.backend.now_ns
    prompt = run.add(2000, 1)
    run.run_until_first_token(prompt)
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert np.percentile(gaps, 95) <= 1.1 * target_ms
    assert np.percentile(gaps, 99) <= 1.6 * target_ms
    assert gaps.max() <= 3 * target_ms
    num_steps = len(gaps) / 4
    num_long = run.core.stats().scheduling.num_floor_steps
    assert num_steps / 40 - 1 <= num_long <= num_steps / 25 + 1
    # What is left of every 25 steps, after the long one has read what is behind its chunk.
    machine = run.backend.machine
    streams_ms = 1.2 * LONE_ITL_MS  # they have grown
    cost_ms = machine.token + 2000 * machine.pair
    tokens = (1.5 * target_ms - streams_ms - 2000 * machine.key) / cost_ms
    cycle_ms = 24 * streams_ms + 1.5 * target_ms
    assert run.lives[prompt].ttft_ms < 2000 / tokens * cycle_ms


@pytest.mark.parametrize(("late_every", "long_every"), [(0, 25), (97, 34), (9, 40)])
def test_steps_that_were_late_anyway_are_of_the_same_budget(
    late_every: int, long_every: int
) -> None:
    """Four of a hundred are late, on purpose or not; but one of 40 prompts have for certain."""
    controller = ItlController(token_budget=512, fixed_chunk=0, page_size=16, itl_target_ms=12.0)
    streams: Any = [SimpleNamespace(num_tokens=1601, prefill_end=1000)] * 4
    prompt: Any = SimpleNamespace(num_tokens=9000, prefill_end=9000)
    chunks = [ScheduledChunk(one, 1600, 1601, 1600, (), True) for one in streams]
    num_long = 0
    for i in range(2200):
        room = controller.room(streams)
        is_long = room.instead is None
        num_long += is_long and i >= 200
        more = [ScheduledChunk(prompt, 5000, 5010, 5000, (), False)] if is_long else []
        plan = StepPlan([*chunks, *more], passes_oldest=not is_long)
        controller.note(plan)
        late = late_every and i % late_every == 0
        controller.learn(plan, 17.0 if is_long or late else 10.0)
    assert num_long == pytest.approx(2000 / long_every, abs=3)


@pytest.mark.parametrize("stalls", [0.02, 0.12])
def test_stalls_that_no_smaller_chunk_would_mend_leave_prompts_their_room(stalls: float) -> None:
    """They take five times as long: streams alone exceed the target then, prompts or not."""
    target_ms = 1.6 * LONE_ITL_MS

    def tokens(machine: Machine) -> int:
        run = with_streams(machine=machine, itl_target_ms=target_ms)
        prompt = run.core._live[run.add(6000, 1)]
        steps = len(run.backend.batches) + 60
        while len(run.backend.batches) < steps:
            run.step()
        return prompt.num_computed_tokens

    assert tokens(Machine(stalls=stalls)) > 0.7 * tokens(Machine())


def test_a_slow_second_costs_a_prompt_that_second() -> None:
    """And no more: the steps after it are as long as those before."""
    target_ms = 3 * LONE_ITL_MS

    def ttft_ms(slow_ms: float) -> float:
        run = with_streams(itl_target_ms=target_ms)
        prompt = run.add(6000, 1)
        run.run_for(500)
        usual = run.backend.machine
        names = ("step", "row", "token", "key", "pair")
        run.backend.machine = Machine(*(2.5 * getattr(usual, name) for name in names))
        run.run_for(slow_ms)
        run.backend.machine = usual
        run.run_until_first_token(prompt)
        return run.lives[prompt].ttft_ms

    assert ttft_ms(1000) < ttft_ms(0) + 1.25 * 1000


def test_prompts_as_long_as_each_other_end_in_the_order_they_came() -> None:
    """Also where those under way have so much behind them that no small chunk is worth it."""
    run = with_streams(itl_target_ms=1.6 * LONE_ITL_MS, num_pages=20_000, max_running=32)
    prompts = [run.add([1 + i, *run.tokens(1500)], 1) for i in range(20)]
    for prompt in prompts[:8]:
        run.run_until_first_token(prompt)
    first = [run.lives[prompt].token_ns[:1] for prompt in prompts]
    assert first[:8] == sorted(first[:8])
    assert not any(first[8:])


def test_an_answer_of_a_few_tokens_waits_for_no_place_of_a_stream() -> None:
    """The target has room for three or four streams, and others wait."""
    run = with_streams(8, itl_target_ms=1.2 * LONE_ITL_MS)
    brief, other = run.add(200, 2), run.add(200, 2)
    run.run_until_first_token(brief)
    run.run_until_first_token(other)
    assert len(run.core._scheduler.waiting) >= 4
    assert run.now_ms - run.lives[other].added_ns / 1e6 < 5000


def test_no_step_is_long_where_the_target_leaves_room() -> None:
    run = with_streams(itl_target_ms=6 * LONE_ITL_MS)
    run.run_until_first_token(run.add(6000, 1))
    assert run.core.stats().scheduling.num_floor_steps == 0


def test_a_margin_that_a_bad_time_left_behind_goes_away() -> None:
    """Streams alone show that steps take what is predicted again."""
    machine = Machine(stalls=0.3)
    target_ms = 1.6 * LONE_ITL_MS
    run = with_streams(machine=machine, itl_target_ms=target_ms)
    run.add(6000, 1)
    run.run_for(1500)
    run.backend.machine = Machine()
    run.run_for(3000)
    begun_ns = run.backend.now_ns
    run.run_for(1000)
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert np.percentile(gaps, 95) <= 1.1 * target_ms
    assert np.percentile(gaps, 90) > LONE_ITL_MS * 1.3


def test_faster_than_any_fixed_chunk_that_keeps_as_much() -> None:
    def trial(**config: Any) -> tuple[float, float]:
        run = with_streams(**config)
        begun_ns = run.backend.now_ns
        prompt = run.add(6000, 1)
        run.run_until_first_token(prompt)
        gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
        return float(np.percentile(gaps, 95)), run.lives[prompt].ttft_ms

    p95_ms, ttft_ms = trial(itl_target_ms=8 * LONE_ITL_MS)
    fixed = [trial(decode_token_budget=chunk) for chunk in (16, 20, 24, 28, 32, 48, 64)]
    as_good = [other_ms for p95, other_ms in fixed if p95 <= 1.02 * p95_ms]
    assert as_good and ttft_ms < min(as_good) / 0.9


def test_case_39_a_flood_of_prompts_starves_no_stream() -> None:
    """20 prompts of 4k a second for 30 s; this machine computes about one in three. After
    sgl-project/sglang#32549, where streams got a step in 24 s."""
    target_ms = 4 * LONE_ITL_MS
    run = with_streams(itl_target_ms=target_ms, max_running=12)
    begun_ns = run.backend.now_ns
    num_arrived = 0
    while (since_ms := (run.backend.now_ns - begun_ns) / 1e6) < 30_000:
        while num_arrived < since_ms / 50:
            run.add(4000, 1)
            num_arrived += 1
        run.step()
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert np.percentile(gaps, 99) <= 1.2 * target_ms
    assert gaps.max() <= 3 * target_ms
    assert run.core.stats().num_computed_tokens > 5 * 4000


def test_case_40_one_very_long_prompt() -> None:
    """Where streams may take 60 % of the time, the prompt takes the rest and no more. After
    local-inference-lab/vllm#541, where it took 97 %."""
    lone = LONE_ITL_MS
    run = with_streams(itl_target_ms=lone / 0.6)
    begun_ns = run.backend.now_ns
    prompt = run.add(16_000, 1)
    run.run_for(4000)
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert np.percentile(gaps, 95) <= 1.1 * lone / 0.6
    request = run.core._live[prompt]
    assert request.num_computed_tokens > 1000


def test_without_a_target_a_step_takes_eight_times_its_streams() -> None:
    run = with_streams(warm=True)
    # Long chunks are new to the model: what they cost is learned from a first prompt's.
    run.run_until_first_token(run.add(6000, 1))
    begun_ns = run.backend.now_ns
    prompt = run.add(6000, 1)
    run.run_until_first_token(prompt)
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert 4 * LONE_ITL_MS < np.median(gaps) < 10 * LONE_ITL_MS
    assert lone_ttft_ms(6000) / run.lives[prompt].ttft_ms > 0.8


def test_a_fixed_chunk_is_that_and_nothing_else() -> None:
    run = with_streams(decode_token_budget=512, itl_target_ms=0)
    prompt = run.add(6000, 1)
    run.run_until_first_token(prompt)
    sizes = [batch.token_ids.size for batch in run.backend.batches if batch.token_ids.size > 4]
    assert sizes[-12:-1] == [512] * 11


def test_a_step_that_no_stream_waits_for_is_bounded_too() -> None:
    run = Simulation()
    run.add(12_000, 1)
    run.run()
    times = [run.backend.machine.step_ms(batch) for batch in run.backend.batches]
    assert max(times) < 300


def test_prompts_move_also_where_the_streams_fill_the_target() -> None:
    run = with_streams(8, itl_target_ms=1.0)
    num_before = len(run.backend.batches)
    prompt = run.add(200, 1)
    while not any(isinstance(e, Started) for e in run.step()):
        run.core.abort(next(iter(run.core._live)))
    run.run_until_first_token(prompt)
    assert len(run.backend.batches) - num_before <= 201


def test_no_more_streams_than_the_target_allows() -> None:
    run = Simulation(itl_target_ms=20.0)
    names = [run.add(50, 400) for _ in range(40)]
    run.run()
    gaps = gaps_since(run, names, run.lives[names[0]].token_ns[0] + int(3e9))
    assert np.percentile(gaps, 95) <= 1.2 * 20.0
    assert all(len(run.lives[name].token_ns) == 400 for name in names)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_machine_that_changes_under_load(factor: float) -> None:
    """Within a second of prompt work the target is kept again, or the prompt is faster."""
    target_ms = 8 * LONE_ITL_MS
    run = with_streams(itl_target_ms=target_ms)
    run.add(9000, 1)
    run.run_for(500)
    machine = run.backend.machine
    run.backend.machine = Machine(
        *(factor * getattr(machine, name) for name in ("step", "row", "token", "key", "pair"))
    )
    run.run_for(1000)
    begun_ns = run.backend.now_ns
    run.add(3000, 1)
    run.run_for(3000)
    gaps = gaps_since(run, [f"r{i}" for i in range(4)], begun_ns)
    assert np.percentile(gaps, 95) <= 1.15 * target_ms


@pytest.mark.parametrize(("took_ms", "learned"), [(1.0, 20), (2.5, 50), (5.0, 100), (12.0, 100)])
def test_of_short_steps_of_streams_alone_one_in_a_while_is_learned_from(
    took_ms: float, learned: int
) -> None:
    """But each that has a prompt in it."""
    controller = ItlController(token_budget=512, fixed_chunk=0, page_size=16, itl_target_ms=0.0)
    stream: Any = SimpleNamespace(num_tokens=1601, prefill_end=1000)
    prompt: Any = SimpleNamespace(num_tokens=9000, prefill_end=9000)
    alone = StepPlan([ScheduledChunk(stream, 1600, 1601, 1600, (), True)])
    both = StepPlan([*alone.chunks, ScheduledChunk(prompt, 5000, 5010, 5000, (), False)])
    for _ in range(50):  # the pace is found
        controller.learn(both, took_ms)
    num_before = controller.model.num_steps
    for _ in range(100):
        controller.learn(alone, took_ms)
    assert controller.model.num_steps - num_before == pytest.approx(learned, abs=6)
    num_before = controller.model.num_steps
    for _ in range(10):
        controller.learn(both, took_ms)
    assert controller.model.num_steps - num_before == 10


def test_the_load_is_at_most_a_few_steps_old_and_never_while_anything_happens() -> None:
    run = with_streams(3, itl_target_ms=0.0)

    def lags_ms() -> float:
        """By how much the longest wait for a place is told as longer than it is."""
        now = run.core.stats().scheduling.load
        return (run.core.load.place_waits_s[-1] - now.place_waits_s[-1]) * 1e3

    lags = []
    for _ in range(40):
        run.step()
        lags.append(lags_ms())
    assert 0 < max(lags) <= 8 * 1.5 * LONE_ITL_MS
    assert sum(lag == 0 for lag in lags) >= 40 / 8
    run.add(100, 2)
    while len(run.core._live) > 3:
        run.step()
        assert not lags_ms()
    run.core.abort("r0")
    run.step()
    assert run.core.stats().scheduling.load == run.core.load

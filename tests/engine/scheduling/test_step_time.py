"""The model of step time: it finds the costs, shrugs off outliers, follows what changes."""

import random

import pytest

from engine.scheduling.step_time import StepTimeModel, StepWork, num_pairs


def work(rng: random.Random) -> StepWork:
    """Four streams and, mostly, a chunk somewhere in a long prompt."""
    keys = 4 * rng.randint(50, 2000)
    length = rng.choice((0, 8, 30, 64, 200))
    past = rng.randint(0, 6000)
    return StepWork(4, 4 + length, keys, num_pairs(past, length), past if length else 0)


def cost_ms(work: StepWork, factor: float = 1.0) -> float:
    return factor * (
        2.7
        + 0.5 * work.rows
        + 0.53 * work.tokens
        + 75e-5 * (work.keys + work.read)
        + 33e-5 * work.pairs
    )


def off(model: StepTimeModel, rng: random.Random, factor: float = 1.0) -> float:
    """The largest relative error over 200 steps."""
    steps = [work(rng) for _ in range(200)]
    return max(abs(model.predict(w) / cost_ms(w, factor) - 1) for w in steps)


def test_costs_are_found_in_a_hundred_noisy_steps() -> None:
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(100):
        step = work(rng)
        model.learn(step, cost_ms(step) * rng.lognormvariate(0, 0.05))
    assert off(model, rng) < 0.15
    assert model.error < 0.1


def test_one_stray_step_in_thirty_does_no_harm() -> None:
    rng = random.Random(2)
    model = StepTimeModel()
    for i in range(300):
        step = work(rng)
        model.learn(step, cost_ms(step) * (20 if i % 30 == 29 else 1))
    assert off(model, rng) < 0.3


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    rng = random.Random(3)
    model = StepTimeModel()
    for _ in range(300):
        step = work(rng)
        model.learn(step, cost_ms(step))
    for _ in range(40):
        step = work(rng)
        model.learn(step, cost_ms(step, factor))
    assert off(model, rng, factor) < 0.25


@pytest.mark.parametrize("chunks", [True, False])
def test_a_neighbour_that_takes_a_core_for_a_second_is_forgotten_at_once(chunks: bool) -> None:
    """Three steps after it came, and three after it went, steps take what is predicted, and those
    that were not seen meanwhile too."""
    rng = random.Random(7)
    model = StepTimeModel()
    for _ in range(300):
        step = work(rng)
        model.learn(step, cost_ms(step) * rng.lognormvariate(0, 0.03))
    before = off(model, rng)
    for factor in (1.6, 1.0):
        for i in range(60):
            step = work(rng) if chunks else StepWork(4, 4, 4 * 1600)
            took = cost_ms(step, factor) * rng.lognormvariate(0, 0.03)
            if i > 3:
                assert abs(model.predict(step) / took - 1) < 0.25, i
            model.learn(step, took)
    assert off(model, rng) < before + 0.1


def test_what_was_long_not_seen_is_learned_anew_from_few_steps() -> None:
    """Ten thousand steps without a prompt, and prompts cost five times as much afterwards."""
    rng = random.Random(4)
    model = StepTimeModel()
    for _ in range(100):
        step = work(rng)
        model.learn(step, cost_ms(step))
    for _ in range(10_000):
        step = StepWork(4, 4, 4 * rng.randint(50, 2000))
        model.learn(step, cost_ms(step))
    for _ in range(12):
        step = StepWork(4, 68, 2000, num_pairs(3000, 64), 3000)
        took = 5 * cost_ms(step)
        model.learn(step, took)
    assert abs(model.predict(step) / took - 1) < 0.2


def test_a_cost_that_came_out_as_nothing_is_found_again() -> None:
    """Chunks that cost nothing for a while, and then what they do."""
    rng = random.Random(6)
    model = StepTimeModel()
    for _ in range(300):
        step = work(rng)
        model.learn(step, cost_ms(step) - 33e-5 * step.pairs)
    assert model.pair_ms < 2e-5
    for _ in range(150):
        step = work(rng)
        model.learn(step, cost_ms(step))
    assert model.pair_ms == pytest.approx(33e-5, rel=0.2)


@pytest.mark.parametrize("took", [1e-9, 1e12])
def test_costs_stay_within_their_bounds(took: float) -> None:
    rng = random.Random(5)
    model = StepTimeModel()
    for _ in range(500):
        model.learn(work(rng), took)
    assert 1e-5 < model.predict(StepWork(1, 1, 1)) < 1e5

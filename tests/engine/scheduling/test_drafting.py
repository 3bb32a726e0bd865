"""How many drafts steps take. The simulated model says the same 126 tokens again and again."""

from typing import Any

import numpy as np
import pytest

from tests.engine.scheduling.simulated import Machine, Simulation
from tests.engine.scheduling.test_itl_controller import LONE_ITL_MS, gaps_since

PERIOD = 126


def in_its_loop(num_streams: int = 1, machine: Machine | None = None, **config: Any) -> Simulation:
    """Streams that have said everything once, and so can be guessed from then on."""
    run = Simulation(machine, speculation=True, **config)
    run.core.warm_up()
    for _ in range(num_streams):
        run.add(60, 20_000)
    while any(len(life.token_ns) < PERIOD + 30 for life in run.lives.values()):
        run.step()
    return run


def tokens_per_ms(run: Simulation, ms: float) -> float:
    before, begun_ms = run.core.stats().num_output_tokens, run.now_ms
    run.run_for(ms)
    return (run.core.stats().num_output_tokens - before) / (run.now_ms - begun_ms)


def drafts_while(run: Simulation, ms: float) -> tuple[int, int]:
    """Drafts, and the tokens said, of all streams in so much time."""
    before = run.core.stats()
    run.run_for(ms)
    after = run.core.stats()
    return (
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_output_tokens - before.num_output_tokens,
    )


def test_a_lone_stream_that_repeats_itself_is_much_faster() -> None:
    run = in_its_loop()
    plain = Simulation()
    plain.add(60, 20_000)
    plain.run_for(500)
    assert tokens_per_ms(run, 500) > 2 * tokens_per_ms(plain, 500)


def test_what_was_never_said_is_not_drafted() -> None:
    run = Simulation(speculation=True)
    run.add([1, 2, 3], PERIOD - 10)
    run.run()
    assert run.core.stats().num_draft_tokens == 0


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("factor", [1.5, 3])
def test_a_target_is_kept_with_drafts(num_streams: int, factor: float) -> None:
    alone = Simulation()
    for _ in range(num_streams):
        alone.add(60, 20_000)
    alone.run_for(1000)
    lone_ms = float(np.median(gaps_since(alone, [*alone.lives], alone.backend.now_ns // 2)))
    run = in_its_loop(num_streams, itl_target_ms=factor * lone_ms)
    begun_ns = run.backend.now_ns
    num_drafts, _ = drafts_while(run, 1000)
    assert num_drafts > 0
    steps = gaps_since(run, [*run.lives], begun_ns)
    assert np.percentile(steps, 95) <= 1.05 * factor * lone_ms


def test_while_a_prompt_waits_the_target_leaves_nothing_for_drafts() -> None:
    run = in_its_loop(4, itl_target_ms=4 * LONE_ITL_MS)
    prompt = run.add(6000, 1)
    run.step()
    before = run.core.stats().num_draft_tokens
    run.run_until_first_token(prompt)
    assert run.core.stats().num_draft_tokens == before
    assert drafts_while(run, 200)[0] > 0


def test_where_many_streams_fill_the_machine_a_draft_has_to_be_surer() -> None:
    """An accepted draft spares its stream's share of a step: the more streams, the less."""
    shares = []
    for num_streams in (1, 4, 16):
        run = in_its_loop(num_streams, Machine(step=1.0, pair=1.5e-3))
        num_drafts, num_tokens = drafts_while(run, 1000)
        shares.append(num_drafts / num_tokens)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6 > 0.2 > shares[-1]


def test_drafts_that_cost_more_than_they_spare_are_never_computed() -> None:
    run = in_its_loop(8, Machine(step=0.05, row=0.5, token=0.5, pair=2e-3))
    run.run_for(500)
    num_drafts, num_tokens = drafts_while(run, 2000)
    assert num_drafts < 0.02 * num_tokens

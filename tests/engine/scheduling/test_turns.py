"""Agents that take turns together: the next prompt of each comes when its last answer has ended."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.types import TokenDelta, unpack_tokens
from tests.engine.scheduling.simulated import Machine, Simulation

MACHINE = Machine(step=3.4, row=0.2, token=0.235, key=0.1e-3, pair=0.06e-3)
"""Two cores with the embedded model: 80 tokens take 28 ms, a step of eight streams 9."""
NEW = 82
BACK_MS = 4.0


@dataclass
class Fleet:
    """Agents with one system prompt. Milliseconds to the first token of first and later turns, and
    between tokens."""

    num_agents: int
    num_new: int = NEW
    num_turns: int = 4
    num_output: int = 48
    first_ms: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    wall_ms: float = 0.0

    def run(self, machine: Machine = MACHINE, num_common: int = 1590) -> "Fleet":
        simulation = Simulation(machine, num_pages=8192)
        simulation.core.warm_up()
        common = simulation.tokens(num_common)
        begun_ms = simulation.now_ms
        coming = [
            (begun_ms, 0, common + simulation.tokens(self.num_new)) for _ in range(self.num_agents)
        ]
        live: dict[str, tuple[int, list[int]]] = {}
        while coming or live:
            if not live:
                simulation.backend.now_ns = int(max(coming[0][0], simulation.now_ms) * 1e6)
            while coming and coming[0][0] <= simulation.now_ms:
                _, turn, prompt = coming.pop(0)
                live[simulation.add(prompt, self.num_output)] = turn, prompt
            for event in simulation.step():
                if isinstance(event, TokenDelta):
                    live[event.request_id][1].extend(unpack_tokens(event.token_ids))
            for name in [name for name in live if simulation.lives[name].finished]:
                turn, prompt = live.pop(name)
                life = simulation.lives[name]
                (self.later_ms if turn else self.first_ms).append(life.ttft_ms)
                self.gaps_ms += life.gaps_ms
                if turn + 1 < self.num_turns:
                    back_ms = simulation.now_ms + BACK_MS
                    coming.append((back_ms, turn + 1, prompt + simulation.tokens(self.num_new)))
        self.wall_ms = simulation.now_ms - begun_ms
        return self


@pytest.mark.parametrize("num_agents", [2, 4, 8, 16])
def test_later_turns_do_not_wait_for_one_another(num_agents: int) -> None:
    """Though all agents began at the same moment and say as much: none waits for more than the
    step that runs when it comes, one of the streams, and its own."""
    fleet = Fleet(num_agents).run()
    own_ms = np.median(Fleet(1).run().later_ms)
    streams_ms = np.median(fleet.gaps_ms)
    assert np.percentile(fleet.later_ms, 95) < own_ms + 1.5 * streams_ms


@pytest.mark.parametrize("num_agents", [4, 8, 16])
def test_a_stream_pauses_for_one_short_prompt_at_a_time(num_agents: int) -> None:
    fleet = Fleet(num_agents).run()
    own_ms = np.median(Fleet(1).run().later_ms)
    assert np.percentile(fleet.gaps_ms, 99) < own_ms + np.median(fleet.gaps_ms)


def test_tiny_prompts_of_a_crowd_share_steps() -> None:
    """Where all that is computed of a prompt takes less than the rest of a step does, those that
    wait in a crowd lose little by going one after another: a tenth of the rate at most."""
    machine = Machine(step=3.4, row=0.0, token=0.235, key=0.0, pair=0.0)
    simulation = Simulation(machine, num_pages=8192)
    simulation.core.warm_up()
    for _ in range(200):
        simulation.add(20, 1)
    begun_ms = simulation.now_ms
    simulation.run()
    computing_ms = 200 * 20 * machine.token
    assert computing_ms / (simulation.now_ms - begun_ms) > 0.9


def prompt_tokens(simulation: Simulation) -> list[int]:
    """Of each step so far, how many tokens of chunks longer than one."""
    lengths = [np.diff(batch.cu_seqlens_q) for batch in simulation.backend.batches]
    return [int(each[each > 1].sum()) for each in lengths]


def beside_a_stream() -> Simulation:
    simulation = Simulation(MACHINE, num_pages=8192)
    simulation.core.warm_up()
    simulation.add(50, 5000)
    simulation.run_for(200)
    simulation.backend.batches.clear()
    return simulation


def test_between_prompts_that_came_together_the_streams_have_a_step() -> None:
    simulation = beside_a_stream()
    for _ in range(3):
        simulation.add(90, 100)
    simulation.run_for(200)
    assert prompt_tokens(simulation)[:6] == [90, 0, 90, 0, 90, 0]


def test_nobody_waits_that_came_at_another_time() -> None:
    simulation = beside_a_stream()
    simulation.add(90, 100)
    simulation.step()
    simulation.add(90, 100)
    simulation.step()
    assert prompt_tokens(simulation) == [90, 90]


def test_nobody_sits_out_a_step_with_a_long_prompt() -> None:
    """It would be no short one."""
    simulation = beside_a_stream()
    simulation.add(5000, 1)
    simulation.run_for(100)
    before = len(simulation.backend.batches)
    for _ in range(3):
        simulation.add(30, 100)
    simulation.run_for(200)
    assert all(prompt_tokens(simulation)[before:])


def test_one_that_shorter_ones_pass_gets_every_other_step() -> None:
    """It could end in one step, but whenever one begins there is one that is shorter."""
    simulation = Simulation(MACHINE, num_pages=8192)
    simulation.core.warm_up()
    simulation.add(50, 5000)
    simulation.run_for(200)
    simulation.add(60, 1)
    simulation.step()
    oldest = simulation.add(100, 1)
    for _ in range(4):
        simulation.add(60, 1)
        simulation.step()
    assert simulation.lives[oldest].token_ns

"""What the supervisor takes for silence, without waiting for it."""

from typing import cast

import pytest

from engine.transport.client import EngineClient
from engine.transport.supervisor import PULSE_S, EngineSupervisor, Supervision
from engine.types import EngineConfig

pytestmark = pytest.mark.anyio
NUM_PULSES = 30


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Watched:
    """An engine that says something by itself, or answers, or does neither, at each pulse."""

    def __init__(self, *, talks: bool = False, answers: bool = False) -> None:
        self._talks = talks
        self._answers = answers
        self._num_pulses = 0
        self.heard_ns = 1
        self.num_asked = 0
        self.killed: list[str] = []

    async def wait_ended(self, timeout_s: float) -> bool:
        self._num_pulses += 1
        self.heard_ns += self._talks
        return self._num_pulses == NUM_PULSES or bool(self.killed)

    def ask_for_sign(self) -> None:
        self.num_asked += 1
        self.heard_ns += self._answers

    def kill(self, reason: str) -> None:
        self.killed.append(reason)


async def watch(client: Watched, limit_s: float) -> None:
    rules = Supervision(step_limit_s=limit_s)
    await EngineSupervisor(EngineConfig(model=""), rules)._watch(cast(EngineClient, client))


async def test_an_idle_engine_that_answers_lives_on_whatever_the_limit() -> None:
    client = Watched(answers=True)
    await watch(client, PULSE_S / 5)
    assert not client.killed
    assert client.num_asked > NUM_PULSES // 4


async def test_one_that_talks_is_not_asked() -> None:
    client = Watched(talks=True)
    await watch(client, PULSE_S / 5)
    assert (client.num_asked, client.killed) == (0, [])


async def test_one_that_does_not_answer_is_killed() -> None:
    client = Watched()
    await watch(client, 2 * PULSE_S)
    assert client.num_asked == 1
    assert client.killed == ["the engine gave no sign of life for 1 s and was killed"]

"""Refusals at the call: who is refused, and whether the time to come back is the truth."""

from typing import Any

import msgspec
import pytest

from engine.api import EngineOverloaded
from engine.overload import Backlog, QueueBounds
from engine.stats import EngineLoad
from engine.types import (
    SHARED_TENANT,
    EngineRequest,
    Prompt,
    SamplingParams,
    Started,
    pack_tokens,
)
from tests.engine.scheduling.simulated import Simulation

LOAD = EngineLoad(prefill_tokens_per_s=1000.0, free_places=100)


def request(name: str, num_tokens: int = 100, **fields: object) -> EngineRequest:
    made = EngineRequest(name, pack_tokens([1] * num_tokens), SamplingParams(8))
    return msgspec.structs.replace(made, **fields)


def backlog(ttft_target_ms: float = 0.0, *, max_open: int = 1000, tokens: int = 1 << 20) -> Backlog:
    made = Backlog(QueueBounds(max_open, tokens, ttft_target_ms))
    made.load = LOAD
    return made


def fill(queue: Backlog, num: int, num_tokens: int = 100, **fields: object) -> int:
    """How many of so many were taken."""
    taken = 0
    for i in range(num):
        try:
            queue.admit(request(f"{fields}{taken}-{i}-{num_tokens}", num_tokens, **fields), taken)
            taken += 1
        except EngineOverloaded:
            break
    return taken


def refusal(queue: Backlog, new: EngineRequest, num_open: int = 1) -> EngineOverloaded:
    with pytest.raises(EngineOverloaded) as refused:
        queue.admit(new, num_open)
    return refused.value


def test_what_would_come_after_the_time_promised_is_refused() -> None:
    """1,000 tokens a second, 2 seconds promised, a quarter of that kept for errors."""
    queue = backlog(2000.0)
    assert fill(queue, 100) == 15
    error = refusal(queue, request("late"))
    assert error.retryable
    assert error.retry_after_s == pytest.approx(0.1, abs=0.01)


def test_looking_counts_nothing() -> None:
    queue = backlog(2000.0)
    for _ in range(100):
        queue.check(Prompt(SHARED_TENANT, 1.0, 0, 100), 0)
    assert fill(queue, 100) == 15
    with pytest.raises(EngineOverloaded) as looked:
        queue.check(Prompt(SHARED_TENANT, 1.0, 0, 100), 15)
    assert looked.value.retry_after_s == refusal(queue, request("late"), 15).retry_after_s


def test_what_is_cached_does_not_count() -> None:
    queue = backlog(2000.0)
    queue.load = msgspec.structs.replace(LOAD, computed_share=0.1)
    assert fill(queue, 1000) == 150


def test_a_short_one_need_not_wait_for_long_ones() -> None:
    queue = backlog(2000.0)
    queue.admit(request("long", 1400), 1)
    refusal(queue, request("long too", 1400), 2)
    queue.admit(request("short", 100), 2)


def test_a_flood_of_one_tenant_does_not_refuse_another() -> None:
    queue = backlog(2000.0)
    fill(queue, 100, tenant="flood")
    refusal(queue, request("one more", tenant="flood"))
    assert fill(queue, 100, tenant="quiet") >= 6


def test_urgent_ones_do_not_wait_for_others() -> None:
    queue = backlog(2000.0)
    fill(queue, 100)
    assert fill(queue, 100, priority=-1) == 15


def test_places_that_become_free_are_waited_for() -> None:
    """Two end soon, two later; whoever comes then runs for 2 seconds itself."""
    queue = backlog(4000.0)
    waits = (0.5, 0.6, 2.6)
    queue.load = msgspec.structs.replace(LOAD, free_places=1, place_waits_s=waits, life_s=2.0)
    assert fill(queue, 100, num_tokens=1) == 7, "a place at 0, 0.5, 0.6, 2.6, and 2, 2.5, 2.6"
    assert refusal(queue, request("late", 1)).retry_after_s == pytest.approx(1.6, abs=0.02)


def test_who_has_nobody_before_it_is_taken_however_long_it_takes() -> None:
    queue = backlog(100.0)
    queue.admit(request("huge", 100_000), 0)
    refusal(queue, request("next"))
    queue.start(Started("huge", 100_000, 0, 1))
    queue.admit(request("next"), 1)
    queue.end("next")
    queue.end("never heard of")
    queue.admit(request("huge", 100_000), 0)


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    queue = backlog(max_open=10)
    assert fill(queue, 100) == 10
    assert refusal(queue, request("late"), 10).retry_after_s == pytest.approx(0.1)
    queue = backlog(tokens=950)
    assert fill(queue, 100) == 9
    assert refusal(queue, request("late", 300), 9).retry_after_s == pytest.approx(0.25)
    queue = backlog(tokens=950)
    queue.admit(request("larger than the bound", 2000), 0)


def test_an_engine_that_measured_nothing_promises_a_second() -> None:
    queue = backlog(100.0, max_open=5)
    queue.load = EngineLoad()
    assert fill(queue, 100) == 5
    assert refusal(queue, request("late"), 5).retry_after_s == 1.0


class Overloaded:
    """A simulated engine behind a backlog, and clients that come at a given rate."""

    def __init__(self, ttft_target_ms: float, **config: Any) -> None:
        self.run = Simulation(ttft_target_ms=ttft_target_ms, **config)
        self.backlog = Backlog(QueueBounds(1088, 1 << 20, ttft_target_ms))
        self.backlog.load = self.run.core.load
        self.admitted: list[str] = []
        self.refused: list[tuple[float, float]] = []

    def ask(self, num_tokens: int, max_tokens: int) -> bool:
        name = f"r{len(self.run.lives)}"
        asked = msgspec.structs.replace(request(name, num_tokens), sampling=SamplingParams(9))
        num_open = sum(life.finished is None for life in self.run.lives.values())
        try:
            self.backlog.admit(asked, num_open)
        except EngineOverloaded as error:
            self.refused.append((self.run.now_ms, error.retry_after_s * 1e3))
            return False
        assert self.run.add(num_tokens, max_tokens) == name
        self.admitted.append(name)
        return True

    def step(self) -> None:
        if not self.run.core.has_work:
            self.run.backend.now_ns += 1_000_000
        for event in self.run.step():
            if isinstance(event, Started):
                self.backlog.start(event)
        self.backlog.load = self.run.core.load

    def flood(self, seconds: float, per_s: float, num_tokens: int, max_tokens: int) -> None:
        """So many requests a second, whatever happens to them."""
        begun_ms = self.run.now_ms
        num_asked = 0
        while (since_ms := self.run.now_ms - begun_ms) < seconds * 1e3:
            while num_asked < since_ms / 1e3 * per_s:
                self.ask(num_tokens, max_tokens)
                num_asked += 1
            self.step()


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "itl_target_ms"),
    [(400, 1, 0.0), (400, 40, 40.0), (60, 200, 40.0), (60, 200, 0.0)],
    ids=["prompts", "both", "answers", "no itl target"],
)
def test_ten_times_too_much_for_a_minute(
    num_tokens: int, max_tokens: int, itl_target_ms: float
) -> None:
    """Those that are admitted get their first token in time; much of the capacity is used."""
    target_ms = 4000.0
    load = Overloaded(target_ms, itl_target_ms=itl_target_ms, max_running=32)
    load.flood(60, 40, num_tokens, max_tokens)
    assert load.refused
    load.run.run()
    ttfts = [load.run.lives[name].ttft_ms for name in load.admitted]
    assert sum(ttft <= target_ms for ttft in ttfts) >= 0.99 * len(ttfts)
    assert max(ttfts) > 0.3 * target_ms, "not by refusing more than needed"


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens"), [(400, 1), (200, 40)], ids=["prompts", "answers"]
)
def test_the_time_to_come_back_is_the_truth(num_tokens: int, max_tokens: int) -> None:
    """After an overload stops, the same request is taken for the first time within 30 % of it."""
    off = []
    for seconds in (9.0, 11.0, 13.5):
        load = Overloaded(4000.0, itl_target_ms=60.0, max_running=32)
        load.flood(seconds, 60, num_tokens, max_tokens)
        large = 8 * num_tokens  # one that has to wait for much of the queue
        assert not load.ask(large, max_tokens)
        told_at_ms, wait_ms = load.refused[-1]
        while not load.ask(large, max_tokens):
            load.step()
        off.append((load.run.now_ms - told_at_ms) / wait_ms)
    assert all(0.7 <= each <= 1.3 for each in off), off

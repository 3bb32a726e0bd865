"""A step that was prepared while the one before it computed is the step that would have been
planned after it, and nobody can tell from the events."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from engine.scheduling.core import EngineCore
from engine.scheduling.step_plan import StepPlan
from engine.types import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    SamplingParams,
    Started,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)
from tests.engine.tiny import EOS, PAGE, prompt, tiny_core


@dataclass
class Course:
    """Requests, aborts and credits at random, which depend on the seed and the steps alone, each of
    a millisecond; the events of a step are read while the next one computes, or later."""

    core: EngineCore
    seed: int
    clock: list[int]
    told: list[tuple[object, ...]] = field(default_factory=list)
    num_requests: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _unread: list[Iterable[EngineEvent]] = field(default_factory=list)

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            self._something_happens(number)
            if self.core.has_work:
                self._unread.append(self._step())
            if self.rng.random() < 0.2:
                self.core.audit()
        for request_id in range(self.num_requests):
            self.core.grant(str(request_id), 1000)
        while self.core.has_work:
            self._unread.append(self._step())
        self._read()
        assert self.core.audit().referenced == 0

    def answers(self) -> dict[str, list[tuple[object, ...]]]:
        """What each request was told, but for those that were aborted."""
        by_request: dict[str, list[tuple[object, ...]]] = {}
        for name, *what in self.told:
            by_request.setdefault(str(name), []).append(tuple(what))
        return {
            name: [each for each in events if len(each) > 1]
            for name, events in by_request.items()
            if events[-1][0] is not FinishReason.ABORT
        }

    def _step(self) -> Iterable[EngineEvent]:
        self.clock[0] += 1_000_000
        return self.core.step(self._read if self.rng.random() < 0.9 else lambda: None)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self.told += [_seen(event) for events in unread for event in events]

    def _something_happens(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        if rng.random() < 0.12 or not number:
            self.core.add(self._request(rng))
        if rng.random() < 0.03 and self.num_requests:
            self.core.abort(str(rng.randrange(self.num_requests)))
        if rng.random() < 0.3 and self.num_requests:
            self.core.grant(str(rng.randrange(self.num_requests)), rng.randint(1, 30))

    def _request(self, rng: random.Random) -> EngineRequest:
        tokens = prompt(rng.randrange(3), rng.choice([5, PAGE - 1, PAGE, 40]))
        stops = tuple(rng.sample(range(EOS), 2)) if rng.random() < 0.3 else ()
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 50),
            temperature=rng.choice([0.0, 0.0, 0.7]),
            top_k=rng.choice([0, 5]),
            seed=rng.randrange(1000),
            stop_token_ids=stops,
            stop=(bytes((rng.randrange(EOS),)),) if rng.random() < 0.15 else (),
            ignore_eos=rng.random() < 0.5,
        )
        self.num_requests += 1
        name = str(self.num_requests - 1)
        credits = rng.choice([3, 20, 4096])
        return EngineRequest(name, pack_tokens(tokens), sampling, credits=credits)


def _seen(event: EngineEvent) -> tuple[object, ...]:
    """What does not depend on time."""
    match event:
        case Started():
            return event.request_id, event.num_cached_tokens
        case TokenDelta():
            return event.request_id, tuple(unpack_tokens(event.token_ids).tolist()), event.text
        case Finished():
            assert event.reason is not FinishReason.ERROR, event.message
            return event.request_id, event.reason, event.num_output_tokens, event.stop_token_id
    raise AssertionError(event)


def _course(num_pages: int, speculation: bool, seed: int) -> Course:
    clock = [1]
    core = tiny_core(
        num_pages=num_pages,
        speculation=speculation,
        max_context=10 * PAGE,
        clock_ns=lambda: clock[0],
    )
    return Course(core, seed, clock)


def _watch(core: EngineCore, seen: Callable[[StepPlan], None]) -> None:
    """`seen` gets each plan that was prepared and is about to be computed."""
    still_follows = core._scheduler.still_follows

    def watched(plan: StepPlan) -> bool:
        follows = still_follows(plan)
        if follows:
            seen(plan)
        return follows

    core._scheduler.still_follows = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("num_pages", [12, 64])
def test_a_following_plan_is_what_would_be_planned(num_pages: int, speculation: bool) -> None:
    num_followed = 0
    for seed in range(6):
        course = _course(num_pages, speculation, seed)

        def compare(plan: StepPlan, core: EngineCore = course.core) -> None:
            nonlocal num_followed
            core._settle()
            assert core._scheduler.plan(core._clock_ns()) == plan
            num_followed += 1

        _watch(course.core, compare)
        course.run(150)
        course.core.close()
    assert num_followed > 100


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("num_pages", [12, 64])
def test_events_are_those_of_steps_that_are_all_planned(num_pages: int, speculation: bool) -> None:
    """In their order too, where a page that is taken a step early is not missed elsewhere."""
    num_followed = 0

    def count(plan: StepPlan) -> None:
        nonlocal num_followed
        num_followed += 1

    for seed in range(6):
        course, plain = (_course(num_pages, speculation, seed) for _ in range(2))
        plain.core._scheduler.follow = lambda plan: None  # type: ignore[method-assign]
        _watch(course.core, count)
        for each in (course, plain):
            each.run(150)
            each.core.close()
        assert course.answers() == plain.answers()
        assert num_pages == 12 or course.told == plain.told
    assert num_followed > 100

"""Pages come back from disk while other requests go on."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from engine.scheduling.core import EngineCore
from engine.types import TokenDelta
from prefix_cache import tiers
from prefix_cache.tiers import DiskPage
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

LONG = prompt(1, 12 * PAGE)
OTHERS = [prompt(n, 12 * PAGE) for n in range(2, 5)]


class Gate:
    """Stands before the disk: reading waits until it is opened, and tells that it waits."""

    def __init__(self, core: EngineCore) -> None:
        assert core._restoring is not None
        self.is_open, self.reached = threading.Event(), threading.Event()
        self._read: Callable[[DiskPage], bytes | None] = core._restoring.reader._read
        self.num_read = 0
        core._restoring.reader._read = self.read

    def read(self, page: DiskPage) -> bytes | None:
        self.reached.set()
        assert self.is_open.wait(60)
        self.num_read += 1
        return self._read(page)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """An engine whose pool held `LONG` once; it is on disk now, and taken to be cheap to read."""
    monkeypatch.setattr(tiers, "_WEIGHT", 0.0)
    monkeypatch.setattr(tiers, "_FIRST_GUESS_BYTES_PER_MS", 1e30)
    run = Driver(tiny_core(num_pages=32, max_context=16 * PAGE, cache_disk_pages=200))
    for tokens in (LONG, *OTHERS):
        run.answer(tokens, 4)
    assert cached(run, LONG) == 0
    return run


def cached(run: Driver, tokens: list[int]) -> int:
    name = run.core._desk.namespace("public", "")
    return run.core._cache.peek(name, np.array(tokens, dtype=np.int32))


def deltas(run: Driver, request_id: str, num_steps: int) -> int:
    """How many tokens a request gets in so many steps."""
    return sum(
        isinstance(event, TokenDelta) and event.request_id == request_id
        for _ in range(num_steps)
        for event in run.step()
    )


def test_a_stream_goes_on_while_a_large_prefix_is_read(run: Driver) -> None:
    cold = Driver(tiny_core()).answer(LONG, 4)
    alone = Driver(tiny_core()).answer([5, 6, 7], 60)
    gate = Gate(run.core)
    stream = run.add([5, 6, 7], 60)
    assert deltas(run, stream, 5) == 5
    waiting = run.add(LONG, 4)
    assert deltas(run, stream, 1) == 1
    assert gate.reached.wait(60)
    assert deltas(run, stream, 30) == 30, "a token a step, and the disk gives nothing"
    assert run.answers[waiting].started is None
    assert (run.core.stats().running, run.core.stats().waiting) == (1, 1)
    gate.is_open.set()
    run.run()
    answer = run.answers[waiting]
    assert answer.started is not None
    assert answer.started.cache is not None
    assert answer.started.cache.num_disk_tokens == answer.started.num_cached_tokens > 10 * PAGE
    assert answer.tokens == cold.tokens
    assert run.answers[stream].tokens == alone.tokens
    run.assert_idle()
    run.core.close()


def test_who_needs_the_same_pages_waits_for_the_same_restore(run: Driver) -> None:
    gate = Gate(run.core)
    ids = [run.add([*LONG[: 11 * PAGE], 9, number], 2) for number in range(4)]
    run.step()
    assert gate.reached.wait(60)
    run.step()
    gate.is_open.set()
    run.run()
    assert gate.num_read == 11
    reports = [answer.started.cache for answer in map(run.answers.get, ids) if answer.started]  # type: ignore[union-attr]
    assert sorted(report.num_disk_tokens for report in reports if report) == [0, 0, 0, 11 * PAGE]
    run.assert_idle()
    run.core.close()


def test_an_abort_meanwhile_leaves_what_was_read_in_the_cache(run: Driver) -> None:
    gate = Gate(run.core)
    request_id = run.add(LONG, 4)
    run.step()
    assert gate.reached.wait(60)
    run.core.abort(request_id)
    run.step()
    assert run.answers[request_id].finished is not None
    assert run.core.has_work, "what was begun is brought to its end"
    gate.is_open.set()
    run.run()
    run.assert_idle()
    assert cached(run, LONG) > 10 * PAGE
    run.core.close()


def test_closing_while_the_disk_is_read_gives_the_pages_back(run: Driver) -> None:
    gate = Gate(run.core)
    run.add(LONG, 4)
    run.step()
    assert gate.reached.wait(60)
    closing = threading.Thread(target=run.core.close)
    closing.start()
    gate.is_open.set()
    closing.join()
    assert run.core.audit().referenced == 0


def test_a_request_that_has_no_room_beside_what_is_read_runs_after_it(run: Driver) -> None:
    gate = Gate(run.core)
    first = run.add(LONG, 2)
    run.step()
    assert gate.reached.wait(60)
    large = run.add(prompt(77, 15 * PAGE), 2)
    huge = run.add(prompt(78, 15 * PAGE), 2)
    for _ in range(5):
        run.step()
    gate.is_open.set()
    run.run()
    for request_id in (first, large, huge):
        finished = run.answers[request_id].finished
        assert finished is not None
        assert finished.message == ""
    run.assert_idle()
    run.core.close()

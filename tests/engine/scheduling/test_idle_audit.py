"""While nothing runs the books are checked; what is wrong goes, and the engine serves on."""

import logging

import pytest

from tests.engine.tiny import Driver, prompt, tiny_core


class Clock:
    """Nanoseconds that a test sets."""

    now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def test_an_idle_engine_checks_its_books_once() -> None:
    clock = Clock()
    run = Driver(tiny_core(clock_ns=clock, idle_audit_s=1.0))
    run.answer(prompt(1, 40), 2)
    assert run.core.wake_ns == clock.now_ns + 1_000_000_000
    clock.now_ns = run.core.wake_ns
    run.step()
    assert (run.core.stats().num_audits, run.core.stats().num_audit_differences) == (1, 0)
    assert run.core.wake_ns == 0


def test_a_request_that_comes_first_puts_it_off() -> None:
    clock = Clock()
    run = Driver(tiny_core(clock_ns=clock, idle_audit_s=1.0))
    run.answer(prompt(1, 40), 2)
    clock.now_ns = run.core.wake_ns
    run.answer(prompt(2, 40), 2)
    assert run.core.stats().num_audits == 0
    assert run.core.wake_ns > clock.now_ns


def test_what_is_wrong_is_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    core = tiny_core(clock_ns=clock, idle_audit_s=1.0)
    run = Driver(core)
    cold = [run.answer(prompt(seed, 60), 4).tokens for seed in range(3)]
    (root,) = core._cache._forest.roots.values()
    root.children[0].first_page += 2
    clock.now_ns = core.wake_ns
    with caplog.at_level(logging.ERROR):
        core.step()
    stats = core.stats()
    assert stats.num_audit_differences > 0
    assert stats.num_quarantined_pages > 0
    assert "the cache's books were wrong" in caplog.text
    assert core.audit() == stats.pool
    assert [run.answer(prompt(seed, 60), 4).tokens for seed in range(3)] == cold
    assert core.stats().num_cached_tokens > 60, "the sound ones are still cached"
    run.assert_idle()

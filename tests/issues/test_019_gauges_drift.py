"""sglang#35270: shared pages were counted twice, and the idle check killed the scheduler."""

from tests.engine.tiny import Driver, prompt, tiny_core


def test_256_requests_on_one_prefix_leave_gauges_that_a_walk_confirms() -> None:
    run = Driver(tiny_core(num_pages=200, max_running=64))
    shared = prompt(19, 100)
    for _ in range(4):
        for branch in range(64):
            run.add(shared + prompt(branch, 5 + branch % 40), 3)
        run.run()
    stats = run.core.stats()
    assert run.core.audit() == stats.pool
    assert stats.pool.referenced == 0
    run.assert_idle()

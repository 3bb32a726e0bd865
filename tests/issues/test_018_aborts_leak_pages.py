"""sglang#12693, #2238 and others: an abort at the wrong moment leaked pages until nothing was
admitted."""

import random

import pytest

from prefix_cache import tiers
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


@pytest.mark.parametrize("disk_pages", [0, 40])
def test_a_thousand_aborts_at_any_moment_leave_nothing_referenced(
    monkeypatch: pytest.MonkeyPatch, disk_pages: int
) -> None:
    """With a disk also while pages go out to it or come back from it."""
    monkeypatch.setattr(tiers, "_WEIGHT", 0.0)
    monkeypatch.setattr(tiers, "_FIRST_GUESS_BYTES_PER_MS", 1e30)
    rng = random.Random(18)
    core = tiny_core(
        num_pages=16,
        max_context=10 * PAGE,
        token_budget=32,
        max_running=4,
        cache_disk_pages=disk_pages,
    )
    run = Driver(core)
    shared = prompt(18, 50)
    for round_ in range(200):
        ids = [
            run.add(shared + prompt(rng.randint(1, 20), rng.randint(1, 60)), rng.randint(0, 9))
            for _ in range(5)
        ]
        rng.shuffle(ids)
        for request_id in ids:
            for _ in range(rng.randint(0, 2)):
                run.step()
            run.core.abort(request_id)
        run.run()
        pool = run.core.audit()
        assert pool.referenced == 0, f"after round {round_}"
        assert pool.free + pool.cached + pool.pinned == pool.total
    run.assert_idle()
    assert (run.core.stats().num_restored_pages > 100) == (disk_pages > 0)
    run.core.close()

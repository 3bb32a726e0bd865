"""vllm#31210, #45704: offloaded pages came back corrupted under load, or were evicted between
lookup and use."""

import random

import pytest

from prefix_cache import tiers
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

PREFIXES = [prompt(1500 + n, 6 * PAGE) for n in range(40)]


def test_40_prefixes_cycled_by_64_clients_through_a_small_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device holds a quarter of the working set, the disk holds all of it; what is on disk is
    taken, though this model computes it as fast."""
    monkeypatch.setattr(tiers, "_WEIGHT", 0.0)
    monkeypatch.setattr(tiers, "_FIRST_GUESS_BYTES_PER_MS", 1e30)
    rng = random.Random(15)
    run = Driver(tiny_core(num_pages=60, max_context=9 * PAGE, cache_disk_pages=400))
    alone = [Driver(tiny_core()).answer(prefix, 3).tokens for prefix in PREFIXES]
    for _ in range(6):
        chosen = [rng.randrange(len(PREFIXES)) for _ in range(64)]
        ids = [run.add(PREFIXES[which], 3) for which in chosen]
        run.run()
        for which, request_id in zip(chosen, ids, strict=True):
            assert run.answers[request_id].tokens == alone[which]
    reports = [answer.started.cache for answer in run.answers.values() if answer.started]
    told = sum(report.num_disk_tokens for report in reports if report)
    stats = run.core.stats()
    assert stats.num_restored_pages * PAGE >= told > 40 * PAGE
    assert stats.num_disk_pages > 0 and stats.num_damaged_pages == 0
    phases = [
        p for answer in run.answers.values() if answer.finished for p in answer.finished.phases
    ]
    assert {p.name for p in phases if p.num_disk_tokens} == {"prefix_match"}
    assert 40 * PAGE < sum(p.num_disk_tokens for p in phases) <= stats.num_restored_pages * PAGE
    run.assert_idle()
    run.core.close()


def test_a_flush_forgets_what_is_on_disk() -> None:
    run = Driver(tiny_core(num_pages=20, max_context=12 * PAGE, cache_disk_pages=100))
    for prefix in PREFIXES[:6]:
        run.answer(prefix, 2)
    run.core.flush()
    again = run.answer(PREFIXES[0], 2)
    assert again.started is not None and again.started.num_cached_tokens == 0

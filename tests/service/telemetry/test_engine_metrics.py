"""What is told of the engine's own counts, with each number where it belongs."""

import msgspec
import pytest

from engine.stats import EngineStats, LeaseStats, SchedulingStats
from service.telemetry import metric_list as m
from service.telemetry.dashboards import PANELS
from service.telemetry.engine_metrics import engine_samples
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

COUNTS = {
    "num_disk_pages": 3,
    "num_restored_pages": 5,
    "num_damaged_pages": 7,
    "num_forced_tokens": 13,
}
SCHEDULING = SchedulingStats(
    itl_target_ms=30.0,
    ttft_target_ms=5000.0,
    itl_p50_ms=20.0,
    itl_p95_ms=29.0,
    step_error=0.125,
    oldest_waiting_ms=1500.0,
    waiting_tokens=640,
    num_floor_steps=11,
)
TOLD = {
    (m.DISK_PAGES, ()): 3,
    (m.RESTORED, ()): 5,
    (m.DAMAGED, ()): 7,
    (m.FORCED_TOKENS, ()): 13,
    (m.LEASES, ()): 4,
    (m.LEASED_PAGES, ()): 9,
    (m.LEASING_TENANTS, ()): 2,
    (m.QUEUE_AGE, ()): 1.5,
    (m.QUEUE_TOKENS, ()): 640,
    (m.ITL_TARGET, ()): 0.03,
    (m.ITL_ACHIEVED, ("0.5",)): 0.02,
    (m.ITL_ACHIEVED, ("0.95",)): 0.029,
    (m.TTFT_TARGET, ()): 5.0,
    (m.STEP_ERROR, ()): 0.125,
    (m.FLOOR_STEPS, ()): 11,
}
PRESENT = {m.DISK_PAGES, m.LEASES, m.LEASED_PAGES, m.LEASING_TENANTS, m.QUEUE_AGE, m.QUEUE_TOKENS}


def samples(stats: EngineStats, up: bool) -> dict[tuple[m.Metric, tuple[str, ...]], object]:
    info = tiny_core().info
    return {(s.metric, s.labels): s.value for s in engine_samples(stats, info, "tiny", up)}


@pytest.mark.parametrize("up", [True, False])
def test_scheduling_leases_and_disk(up: bool) -> None:
    """Nothing is present in an engine that is gone, and its counts stand."""
    run = Driver(tiny_core())
    run.answer(prompt(1, 3 * PAGE), 2)
    stats = msgspec.structs.replace(
        run.core.stats(), scheduling=SCHEDULING, leases=LeaseStats(4, 9, 2), **COUNTS
    )
    told = samples(stats, up)
    for key, number in TOLD.items():
        wanted = 0 if not up and key[0] in PRESENT else number
        assert told[key] == pytest.approx(wanted), key
    chunks = told[m.CHUNK, ()]
    assert getattr(chunks, "total", 0) == 3 * PAGE


def test_each_of_them_is_on_the_dashboard() -> None:
    queries = " ".join(query for panel in PANELS for query, _ in panel.queries)
    for metric, _ in TOLD:
        if metric is not m.TTFT_TARGET:
            assert metric.prometheus in queries

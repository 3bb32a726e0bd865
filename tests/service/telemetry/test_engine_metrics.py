"""What is told of the engine's own counts, with each number where it belongs."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import fields

from engine.stats import (
    Distribution,
    EngineStats,
    LeaseStats,
    PoolStats,
    SchedulingStats,
    StepWork,
)
from service.telemetry import metric_list as m
from service.telemetry.dashboards import PANELS
from service.telemetry.engine_metrics import engine_samples
from service.telemetry.request_metrics import ENGINE
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

COUNTS = {
    "num_disk_pages": 3,
    "num_restored_pages": 5,
    "num_damaged_pages": 7,
    "num_forced_tokens": 13,
    "num_drafts": 17,
    "num_draft_tokens": 119,
    "num_accepted_tokens": 23,
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
LABELS = ("tiny", ENGINE)
TOLD = {
    (m.DISK_PAGES, ()): 3,
    (m.RESTORED, ()): 5,
    (m.DAMAGED, ()): 7,
    (m.FORCED_TOKENS, ()): 13,
    (m.DRAFTS, LABELS): 17,
    (m.DRAFT_TOKENS, LABELS): 119,
    (m.ACCEPTED_TOKENS, LABELS): 23,
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


NOT_TOLD = {
    "num_requests",  # the edge counts them as they end
    "num_computed_tokens",  # the sum of what each step computed
    "num_audits",
    "num_steps",  # the count of the steps' durations
}


def raised(value: Any) -> Any:
    """More of the same."""
    match value:
        case int() | float():
            return value + 1
        case Distribution():
            return Distribution(value.bounds, (1, *value.counts[1:]), value.total + 1)
        case dict():
            return {**value, "room": 5}
        case tuple():
            return (StepWork("decode", 1, 1, 2, 1, 1, 1, 1, 1),)
        case PoolStats():
            return msgspec.structs.replace(value, free=value.free - 1, cached=value.cached + 1)
        case SchedulingStats():
            return SCHEDULING
        case LeaseStats():
            return LeaseStats(1, 1, 1)
    raise TypeError(value)


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


@pytest.mark.parametrize("field", sorted({f.name for f in fields(EngineStats)} - NOT_TOLD))
def test_whatever_the_engine_counts_is_told(field: str) -> None:
    """A field that somebody adds to the engine's stats is in the metrics, or named above."""
    stats = Driver(tiny_core()).core.stats()
    more = msgspec.structs.replace(stats, **{field: raised(getattr(stats, field))})
    assert samples(more, True) != samples(stats, True)


def test_each_of_them_is_on_the_dashboard() -> None:
    queries = " ".join(query for panel in PANELS for query, _ in panel.queries)
    for metric, _ in TOLD:
        if metric is not m.TTFT_TARGET:
            assert metric.prometheus in queries

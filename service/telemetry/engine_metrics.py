"""The engine's counts and present state as samples; its numbers are told as it keeps them."""

from collections.abc import Iterator

from engine.stats import Distribution, EngineStats, LeaseStats, SchedulingStats, sum_work
from engine.types import EngineInfo
from service.telemetry import metric_list as m
from service.telemetry.request_metrics import ENGINE
from service.telemetry.samples import Buckets, Sample


def engine_samples(stats: EngineStats, info: EngineInfo, model: str, up: bool) -> Iterator[Sample]:
    """Of an engine that is not `up`, `stats` are its last: its counts stand, nothing runs."""
    labels = (model, ENGINE)
    running = stats.running if up else 0
    waiting = stats.waiting if up else 0
    pool = stats.pool
    yield Sample(m.ENGINE_UP, (), float(up))
    yield Sample(m.RUNNING, labels, running)
    yield Sample(m.WAITING, labels, waiting)
    yield Sample(m.WAITING_BY_REASON, (*labels, "capacity"), waiting)
    yield Sample(m.WAITING_BY_REASON, (*labels, "deferred"), 0)
    yield Sample(m.PAUSED, (), stats.paused if up else 0)
    yield Sample(m.KV_USAGE, labels, pool.referenced / pool.total if up and pool.total else 0.0)
    config = (str(info.page_size), str(info.num_pages), "True")
    yield Sample(m.CACHE_CONFIG, (*labels, *config), 1)
    for state in ("free", "cached", "referenced", "pinned"):
        yield Sample(m.PAGES, (state,), getattr(pool, state) if up else 0)
    for reason, num_pages in stats.evicted_pages.items():
        yield Sample(m.EVICTED, (reason,), num_pages)
    yield Sample(m.DISK_PAGES, (), stats.num_disk_pages if up else 0)
    yield Sample(m.RESTORED, (), stats.num_restored_pages)
    yield Sample(m.DAMAGED, (), stats.num_damaged_pages)
    leases = stats.leases if up else LeaseStats()
    yield Sample(m.LEASES, (), leases.num_leases)
    yield Sample(m.LEASED_PAGES, (), leases.num_pages)
    yield Sample(m.LEASING_TENANTS, (), leases.num_tenants)
    yield Sample(m.AUDIT_DIFFERENCES, (), stats.num_audit_differences)
    yield Sample(m.QUARANTINED, (), stats.num_quarantined_pages)
    computed = stats.num_queried_tokens - stats.num_cached_tokens
    for metric, number in (
        (m.PROMPT_TOKENS, stats.num_prompt_tokens),
        (m.GENERATION_TOKENS, stats.num_output_tokens),
        (m.CACHED_TOKENS, stats.num_cached_tokens),
        (m.CACHE_QUERIES, stats.num_queried_tokens),
        (m.CACHE_HITS, stats.num_cached_tokens),
        (m.PREEMPTIONS, stats.num_preemptions),
        (m.DRAFTS, stats.num_drafts),
        (m.DRAFT_TOKENS, stats.num_draft_tokens),
        (m.ACCEPTED_TOKENS, stats.num_accepted_tokens),
    ):
        yield Sample(metric, labels, number)
    yield Sample(m.FORCED_TOKENS, (), stats.num_forced_tokens)
    yield Sample(m.TOKENS_BY_SOURCE, (*labels, "local_compute"), computed)
    yield Sample(m.TOKENS_BY_SOURCE, (*labels, "local_cache_hit"), stats.num_cached_tokens)
    yield Sample(m.ITERATION_TOKENS, labels, _buckets(stats.step_tokens))
    yield Sample(m.CHUNK, (), _buckets(stats.chunk_tokens))
    yield Sample(m.STEP, (), _buckets(stats.step_ns, 1e-9))
    yield from _scheduling(stats.scheduling, up)
    yield from _roofline(stats)


def _scheduling(kept: SchedulingStats, up: bool) -> Iterator[Sample]:
    """The promises, and how the last steps kept them."""
    yield Sample(m.QUEUE_AGE, (), kept.oldest_waiting_ms / 1e3 if up else 0.0)
    yield Sample(m.QUEUE_TOKENS, (), kept.waiting_tokens if up else 0)
    yield Sample(m.ITL_TARGET, (), kept.itl_target_ms / 1e3)
    yield Sample(m.ITL_ACHIEVED, ("0.5",), kept.itl_p50_ms / 1e3)
    yield Sample(m.ITL_ACHIEVED, ("0.95",), kept.itl_p95_ms / 1e3)
    yield Sample(m.TTFT_TARGET, (), kept.ttft_target_ms / 1e3)
    yield Sample(m.STEP_ERROR, (), kept.step_error)
    yield Sample(m.FLOOR_STEPS, (), kept.num_floor_steps)


def _roofline(stats: EngineStats) -> Iterator[Sample]:
    """Counters of all steps, to take rates of; gauges of the last ones."""
    if stats.peak_bytes_per_s:
        yield Sample(m.PEAK_BANDWIDTH, (), stats.peak_bytes_per_s)
    if stats.peak_flops_per_s:
        yield Sample(m.PEAK_FLOPS, (), stats.peak_flops_per_s)
    for work in stats.work:
        yield Sample(m.STEPS, (work.kind,), work.num_steps)
        yield Sample(m.STEP_WALL, (work.kind,), work.wall_ns / 1e9)
        yield Sample(m.STEP_KERNEL, (work.kind,), work.kernel_ns / 1e9)
        yield Sample(m.STEP_FLOPS, (work.kind,), work.flops)
        yield Sample(m.STEP_MEMORY, (work.kind,), work.memory_bytes)
    for kind in {step.kind for step in stats.recent_steps}:
        last = sum_work([step for step in stats.recent_steps if step.kind == kind])
        yield Sample(m.INTENSITY, (kind,), last.intensity)
        yield Sample(m.MBU, (kind,), last.mbu)
        yield Sample(m.MFU, (kind,), last.mfu)
        yield Sample(m.HOST_SHARE, (kind,), last.host_share)
        yield Sample(m.VERDICT, (kind, last.verdict.value), 1)


def _buckets(kept: Distribution, scale: float = 1.0) -> Buckets:
    """Scaled to the metric's unit."""
    bounds = tuple(bound * scale for bound in kept.bounds)
    return Buckets(bounds, kept.counts, kept.total * scale)

"""What the parts of an engine know of its life, as one account."""

from engine.scheduling.idle_audit import IdleAudit
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_meter import StepMeter
from engine.scheduling.totals import Totals
from engine.stats import EngineStats, LeaseStats, PoolStats
from prefix_cache.cache import PoolCounts, PrefixCache


def gather_stats(
    totals: Totals,
    scheduler: Scheduler,
    cache: PrefixCache,
    meter: StepMeter,
    idle_audit: IdleAudit,
    now_ns: int,
) -> EngineStats:
    """As they are between two steps."""
    running = scheduler.running
    num_disk, num_restored, num_damaged = cache.count_disk()
    return EngineStats(
        pool=pool_stats(cache.stats()),
        running=len(running),
        waiting=len(scheduler.waiting),
        paused=sum(request.paused for request in running),
        step_ns=meter.step_ns.distribution(),
        step_tokens=meter.step_tokens.distribution(),
        chunk_tokens=meter.chunk_tokens.distribution(),
        work=meter.work(),
        recent_steps=meter.recent_steps(),
        peak_bytes_per_s=meter.peaks.bytes_per_s if meter.peaks else 0.0,
        peak_flops_per_s=meter.peaks.flops_per_s if meter.peaks else 0.0,
        evicted_pages={
            "room": cache.evicted_for_room,
            "flush": cache.evicted_by_flush,
        },
        num_queried_tokens=totals.queried_tokens,
        num_steps=totals.steps,
        num_requests=totals.requests,
        num_prompt_tokens=totals.prompt_tokens,
        num_cached_tokens=totals.cached_tokens,
        num_computed_tokens=totals.computed_tokens,
        num_output_tokens=totals.output_tokens,
        num_forced_tokens=totals.forced_tokens,
        num_drafts=totals.drafts,
        num_draft_tokens=totals.draft_tokens,
        num_accepted_tokens=totals.accepted_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_disk_pages=num_disk,
        num_restored_pages=num_restored,
        num_damaged_pages=num_damaged,
        num_audits=idle_audit.num_audits,
        num_audit_differences=idle_audit.num_differences,
        num_quarantined_pages=idle_audit.num_quarantined_pages,
        leases=LeaseStats(*cache.leases.count()),
        scheduling=scheduler.stats(now_ns),
    )


def pool_stats(counts: PoolCounts) -> PoolStats:
    """Pages by state, as they are told."""
    return PoolStats(
        total=counts.total,
        free=counts.free,
        cached=counts.cached,
        referenced=counts.referenced,
        pinned=counts.pinned,
    )

"""Sums of steps and the machine's peaks, with what follows from them, for people and pages."""

from typing import Any

from engine.stats import EngineStats, StepWork
from engine.types import EngineInfo


def describe_work(work: StepWork) -> dict[str, Any]:
    """A `StepWork` and what follows from it, for people and pages."""
    wall_s = work.wall_ns / 1e9
    return {
        "kind": work.kind,
        "steps": work.num_steps,
        "tokens": work.num_tokens,
        "wall_s": wall_s,
        "kernel_s": work.kernel_ns / 1e9,
        "flops": work.flops,
        "memory_bytes": work.memory_bytes,
        "flops_per_s": work.flops / wall_s if wall_s else 0.0,
        "bytes_per_s": work.memory_bytes / wall_s if wall_s else 0.0,
        "intensity": work.intensity,
        "mbu": work.mbu,
        "mfu": work.mfu,
        "host_share": work.host_share,
        "verdict": work.verdict.value,
    }


def describe_machine(info: EngineInfo, stats: EngineStats) -> dict[str, Any]:
    """Peaks are null where the machine was not measured; left of `ridge_intensity` the memory is
    the limit, right of it the operations."""
    known = stats.peak_bytes_per_s > 0
    return {
        "backend": info.backend,
        "numeric_mode": info.numeric_mode,
        "threads": info.threads,
        "peak_bytes_per_s": stats.peak_bytes_per_s if known else None,
        "peak_flops_per_s": stats.peak_flops_per_s if known else None,
        "ridge_intensity": stats.peak_flops_per_s / stats.peak_bytes_per_s if known else None,
    }

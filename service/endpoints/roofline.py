"""`GET /v1/roofline`: what the engine's steps waited for, beside what this machine can do."""

from typing import Any

from starlette.types import Receive, Scope, Send

from engine.api import Engine, EngineError
from engine.stats import StepWork
from engine.types import EngineInfo
from service.errors import from_engine
from service.transport.http import send_json


class Roofline:
    """The sums by kind of step since the start, and the last steps one by one, oldest first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError when the engine is gone."""
        try:
            stats = await self._engine.stats()
        except EngineError as error:
            raise from_engine(error) from error
        answer = {
            "object": "roofline",
            "machine": describe_machine(self._engine.info),
            "phases": [describe_work(work) for work in stats.work],
            "recent": [describe_work(work) for work in stats.recent_steps],
        }
        await send_json(send, answer)


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


def describe_machine(info: EngineInfo) -> dict[str, Any]:
    """Peaks are null where the machine was not measured; left of `ridge_intensity` the memory is
    the limit, right of it the operations."""
    known = info.peak_bytes_per_s > 0
    return {
        "backend": info.backend,
        "numeric_mode": info.numeric_mode,
        "threads": info.threads,
        "peak_bytes_per_s": info.peak_bytes_per_s if known else None,
        "peak_flops_per_s": info.peak_flops_per_s if known else None,
        "ridge_intensity": info.peak_flops_per_s / info.peak_bytes_per_s if known else None,
    }

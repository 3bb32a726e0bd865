"""Workloads: small TOML files, and what makes sessions of them."""

from pathlib import Path

import msgspec

from loadtest import arrival
from loadtest.plan import PartPlan, Plan
from loadtest.workloads.conversations import conversations
from loadtest.workloads.replay import replay
from loadtest.workloads.spec import Conversations, Replay, Slo, Workload

__all__ = [
    "Slo",
    "Workload",
    "WorkloadError",
    "build_plan",
    "names",
    "read_workload",
    "without_paths",
]

HERE = Path(__file__).parent


class WorkloadError(ValueError):
    """A workload or its trace cannot be used; the message is a sentence for the user."""


def names() -> list[str]:
    """The workloads that come with the tool."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def read_workload(name: str, trace: str | None = None) -> Workload:
    """The workload of that name, or of that file where the name ends in .toml. `trace` is the
    file of its replay parts. Raises WorkloadError."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    if not path.is_file():
        raise WorkloadError(f"there is no workload {name!r}; known: {', '.join(names())}")
    try:
        workload = msgspec.toml.decode(path.read_bytes(), type=Workload)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise WorkloadError(f"workload {name!r}: {error}") from error
    if trace is not None:
        parts = tuple(
            msgspec.structs.replace(part, trace=trace) if isinstance(part, Replay) else part
            for part in workload.parts
        )
        workload = msgspec.structs.replace(workload, parts=parts)
    return workload


def without_paths(workload: Workload) -> Workload:
    """The workload as a report may tell it: a trace by its file's name alone."""
    parts = tuple(
        msgspec.structs.replace(part, trace=Path(part.trace).name)
        if isinstance(part, Replay)
        else part
        for part in workload.parts
    )
    return msgspec.structs.replace(workload, parts=parts)


def build_plan(
    workload: Workload, seed: str, concurrency: int | None = None, rate_per_s: float | None = None
) -> Plan:
    """The sessions of one run, the same for the same arguments. Prefixes are new for each seed.

    `concurrency` and `rate_per_s` replace those of closed and Poisson parts. Raises WorkloadError.
    """
    parts = []
    for part in workload.parts:
        when = arrival.at_level(part.arrival, concurrency, rate_per_s)
        try:
            sessions = (
                conversations(part, when, f"{seed}/{part.name}")
                if isinstance(part, Conversations)
                else replay(part, when, f"{seed}/{part.name}")
            )
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise WorkloadError(f"part {part.name!r}: {error}") from error
        closed = when.concurrency if isinstance(when, arrival.Closed) else None
        beside = when if isinstance(when, arrival.Beside) else None
        parts.append(PartPlan(part.name, tuple(sessions), closed, beside))
    if any(part.beside for part in parts) and not any(part.concurrency for part in parts):
        raise WorkloadError("a part that arrives beside others needs a closed one beside it")
    return Plan(tuple(parts))

"""Samples and runs made by hand."""

from collections.abc import Sequence

from loadtest.measure.client import ClientLoad
from loadtest.measure.progress import Progress
from loadtest.measure.result import Level, Machine, Report, Run, TargetInfo
from loadtest.measure.sample import Kind, Role, Sample, Usage
from loadtest.measure.summary import summarise
from loadtest.workloads import Slo, read_workload

LEVEL = Level("concurrency", 4)


def sample(
    turn: int = 0,
    *,
    due_s: float = 10.0,
    sent_s: float | None = None,
    times_s: Sequence[float] = (10.1, 10.12, 10.14),
    usage: Usage | None = None,
    error: Kind | None = None,
    role: Role = Role.ORDINARY,
) -> Sample:
    """A request with a piece at each of `times_s`, which ended with the last of them."""
    made = Sample("0", "agents", turn, 16, due_s, due_s if sent_s is None else sent_s)
    for time_s in times_s:
        made.add("word ", time_s)
    made.end_s = times_s[-1] if times_s else due_s + 1
    made.usage = usage or Usage(100, len(times_s), 50)
    made.finished = error is None
    made.error = error
    made.message = "why it failed" if error else ""
    made.role = role
    return made


def run_of(
    samples: Sequence[Sample],
    target: str = "ours",
    repeat: int = 0,
    slo: Slo | None = None,
    level: Level = LEVEL,
) -> Run:
    """The run of these samples from second 10 to second 20."""
    progress = Progress(len(samples), list(samples), start_s=10.0, end_s=20.0)
    progress.client = ClientLoad(0.1, 0.5, 1.0, 2.0)
    return summarise(target, level, repeat, progress, slo or Slo(), streams=True)


def report_of(runs: Sequence[Run], *, interrupted: bool = False) -> Report:
    """A report of these runs."""
    return Report(
        format="loadtest/1",
        made="2026-01-01 00:00 UTC",
        machine=Machine("A <fast> CPU", 2, 24.0, "Linux"),
        workload_name="agents",
        workload=read_workload("agents"),
        transport="chat-sse",
        seed="1",
        warm=False,
        slo=Slo(),
        targets=[
            TargetInfo(name, "http://127.0.0.1", "m")
            for name in dict.fromkeys(r.target for r in runs)
        ],
        runs=list(runs),
        interrupted=interrupted,
    )

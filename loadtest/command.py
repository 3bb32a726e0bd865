"""What the command line does. Exit code 0 when all is well, 1 when a request failed or an assertion
does not hold, 2 when nothing could run, 130 when interrupted."""

import argparse
import asyncio
import contextlib
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from loadtest import assertions
from loadtest.campaign import Campaign, Outcome, Watch, run_campaign
from loadtest.compare import ratios
from loadtest.interrupts import Interrupts
from loadtest.machine import this_machine
from loadtest.measure.memory import MemoryWatch, tree_pss_bytes
from loadtest.measure.pooled import pool
from loadtest.measure.progress import Progress
from loadtest.measure.result import FORMAT, Level, Report
from loadtest.options import parse
from loadtest.report.files import ReportError, read_json, write_json, write_whole
from loadtest.report.html import page
from loadtest.report.live import LiveView
from loadtest.report.picture import picture
from loadtest.report.readme import readme_section, rewrite
from loadtest.report.table import (
    beside_table,
    figures_table,
    goodput_counts,
    notes,
    ratios_table,
)
from loadtest.transports import Target
from loadtest.workloads import WorkloadError, names, read_workload, without_paths


def main(interrupts: Interrupts) -> int:
    """Run the command of the command line; the exit code."""
    options = parse()
    try:
        match options.command:
            case "run" | "compare":
                return load(options, interrupts)
            case "html":
                write_whole(options.out, page(read_json(options.report)))
            case "picture":
                reports = [read_json(path) for path in options.reports]
                write_whole(options.out, picture(reports, _limits(options.limits)))
            case "readme":
                section = readme_section([read_json(path) for path in options.reports])
                if options.picture:
                    section += f"\n\n![Tokens per second by number of streams]({options.picture})"
                if options.write:
                    rewrite(options.write, section)
                else:
                    print(section)
            case _:
                for name in names():
                    print(f"{name:15} {read_workload(name).description}")
    except (WorkloadError, ReportError, OSError, ValueError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    return 0


def _limits(path: Path | None) -> dict[int, float]:
    """Of a file for `picture --limits`. Raises ValueError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, float]) if path else {}
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} has no limits: {error}") from error


def load(options: argparse.Namespace, interrupts: Interrupts) -> int:
    """`run` and `compare`. However it ends, the report of what ran is written."""
    campaign = _campaign(options)
    outcome = Outcome([], [])
    num_runs = len(campaign.targets) * len(campaign.levels) * campaign.repeats
    view = LiveView(Console(stderr=True), num_runs)
    watch = view.watch if options.pid is None else _with_memory(view.watch, options.pid)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(interrupts.run(lambda stop: run_campaign(campaign, outcome, watch, stop)))
    report = _report(options, campaign, outcome)
    if options.json:
        write_json(report, options.json)
    if options.html:
        write_whole(options.html, page(report))
    _print(report)
    return _exit_code(options, report)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop that takes the least from a server on the same cores."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _with_memory(watch: Watch, pid: int) -> Watch:
    """`watch` that also notes the peak of a server's memory. Raises ValueError where it cannot."""
    tree_pss_bytes(pid)

    @contextlib.asynccontextmanager
    async def watch_both(
        target: Target, level: Level, repeat: int, progress: Progress
    ) -> AsyncIterator[None]:
        async with watch(target, level, repeat, progress), MemoryWatch(pid) as memory:
            yield
        progress.pss_peak_bytes = memory.peak_bytes

    return watch_both


def _campaign(options: argparse.Namespace) -> Campaign:
    workload = read_workload(options.workload, options.trace)
    named = (
        [(options.name, options.url.rstrip("/"))] if options.command == "run" else options.target
    )
    targets = tuple(
        Target(name, url, options.model, options.extra, options.api_key, options.chunk_timeout)
        for name, url in named
    )
    known = {target.name for target in targets}
    if len(known) < len(targets):
        raise ValueError("two targets have one name")
    if strangers := {one.target for one in options.assertions if one.target} - known:
        raise ValueError(f"an assertion is about {strangers.pop()!r}, which is no target")
    return Campaign(
        workload=workload,
        transport=options.transport,
        targets=targets,
        levels=tuple(options.levels or [Level("as_written", 0)]),
        repeats=options.repeats,
        seed=options.seed or secrets.token_hex(4),
        slo=options.slo or workload.slo,
        warm=options.warm,
    )


def _report(options: argparse.Namespace, campaign: Campaign, outcome: Outcome) -> Report:
    return Report(
        format=FORMAT,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=this_machine(),
        workload_name=Path(options.workload).stem,
        workload=without_paths(campaign.workload),
        transport=campaign.transport,
        seed=campaign.seed,
        warm=campaign.warm,
        slo=campaign.slo,
        targets=outcome.targets,
        runs=outcome.runs,
        ratios=ratios(outcome.runs),
        verdicts=assertions.judge(options.assertions, pool(outcome.runs)),
        interrupted=outcome.interrupted,
        note=options.note,
    )


def _print(report: Report) -> None:
    if report.runs:
        measured = pool(report.runs)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(figures_table(measured, width))
        print(f"\nGoodput counts {goodput_counts(report.slo)}.")
        if beside := beside_table(measured, width):
            print(f"\nStreams beside a prefill:\n\n{beside}")
    if report.ratios:
        print(f"\n{ratios_table(report.ratios)}")
    print(f"\nseed {report.seed}")
    for note in notes(report):
        print(f"loadtest: {note}", file=sys.stderr)


def _exit_code(options: argparse.Namespace, report: Report) -> int:
    if report.interrupted:
        return 130
    if not report.runs:
        return 2
    asked = {one.figure for one in options.assertions}
    failed = any(run.errors for run in report.runs) and not asked & {"errors", "error_rate"}
    dead = any(target.dead for target in report.targets)
    broken = any(not verdict.holds for verdict in report.verdicts)
    return 1 if failed or dead or broken else 0

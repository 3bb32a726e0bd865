"""Four streams, then one long prompt: what each way of chunking does to both."""

import asyncio
import itertools
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from loadtest.examples.promises.figures import Sheet
from loadtest.examples.promises.server import Server, serving
from loadtest.machine import this_machine
from loadtest.measure.client import ClientWatch
from loadtest.measure.result import FORMAT, Level, Report, Run, TargetInfo
from loadtest.measure.sample import Role, Sample
from loadtest.measure.summary import summarise
from loadtest.report.files import write_json, write_whole
from loadtest.report.picture import picture
from loadtest.run import Progress
from loadtest.transports import Dialogue, Transport, open_transport
from loadtest.workloads import Slo, read_workload
from loadtest.workloads.text import words

NUM_STREAMS: Final = 4
STREAM_PROMPT: Final = 60
QUIET_PIECES: Final = 100
"""Tokens of each stream before the prompt comes."""
TARGETS: Final = (1.5, 2.0, 3.0, 4.5, 6.0)
SHOWN: Final = 3.0
CHUNKS: Final = (24, 48, 80, 128, 192, 288, 512)
NO_CHUNKS: Final = 8192
LOOK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    prompt_tokens: int = 6000
    times: int = 2
    targets: tuple[float, ...] = TARGETS
    chunks: tuple[int, ...] = (*CHUNKS, NO_CHUNKS)


@dataclass(frozen=True, slots=True)
class Point:
    """One way of chunking: the gaps in ms, and the prompt's tokens per second."""

    run: Run

    def itl(self, name: str, when: str = "beside") -> float:
        """`p50`, `p95`, ..."""
        return self.run.figures[f"itl_{when}_{name}_ms"]

    @property
    def speed(self) -> float:
        return self.run.figures["prefill_beside_tok_per_s"]


async def measure(plan: Plan, sheet: Sheet, folder: Path | None) -> None:
    """All of it; the report and the picture go into `folder`."""
    seed = f"{time.time_ns():x}"

    async def point(name: str, *options: str, alone: int = 0, times: int = 1) -> Point:
        async with serving(name, *options) as server:
            run = await _Beside(server, plan, f"{seed}/{name}").run(alone, times)
        return Point(run)

    sheet.say(f"{NUM_STREAMS} streams, then a prompt of {plan.prompt_tokens} tokens")
    base = await point("no target", alone=2, times=1)
    lone_ms = base.itl("p50", "quiet")
    lone_speed = base.run.figures["prefill_alone_tok_per_s"]
    sheet.say(
        f"alone: {lone_ms:.2f} ms between the tokens of {NUM_STREAMS} streams, the prompt "
        f"{lone_speed:.0f} tokens/s"
    )
    sheet.say(f"{'':24}{'p50':>9}{'p95':>9}{'p99':>9}{'longest':>9}  ms; prompt, of its lone speed")
    _show(sheet, base, lone_speed)
    targets: dict[float, Point] = {}
    for factor in plan.targets:
        ms = factor * lone_ms
        name = f"target {ms:.0f} ms ({factor:g}x)"
        times = plan.times if factor == SHOWN else 1
        targets[factor] = await point(name, "--itl-target-ms", f"{ms:.2f}", times=times)
        _show(sheet, targets[factor], lone_speed)
    fixed: dict[int, Point] = {}
    for chunk in plan.chunks:
        name = f"chunks of {chunk}" if chunk < NO_CHUNKS else "no chunks"
        fixed[chunk] = await point(name, "--prefill-chunk", str(chunk))
        _show(sheet, fixed[chunk], lone_speed)
    for factor, one in targets.items():
        _judge(sheet, factor, one, lone_ms, lone_speed, fixed)
    shown = [one for one in (targets.get(SHOWN), fixed.get(512), fixed.get(NO_CHUNKS)) if one]
    if folder is not None:
        for one in shown:
            one.run.figures["prefill_share"] = one.speed / lone_speed
        report = _report(plan, seed, [one.run for one in shown])
        write_json(report, folder / "beside.json")
        write_whole(folder / "beside.svg", picture([report]))
        sheet.say(f"wrote {folder / 'beside.json'} and {folder / 'beside.svg'}")


def _show(sheet: Sheet, one: Point, lone_speed: float) -> None:
    gaps = "".join(f"{one.itl(name):>9.1f}" for name in ("p50", "p95", "p99", "max"))
    sheet.say(f"{one.run.target:<24}{gaps}  {one.speed:.0f} tokens/s, {one.speed / lone_speed:.0%}")


def _judge(
    sheet: Sheet,
    factor: float,
    one: Point,
    lone_ms: float,
    lone_speed: float,
    fixed: dict[int, Point],
) -> None:
    target_ms = factor * lone_ms
    name = f"target {factor:g}x:"
    sheet.judge(f"{name} p95", one.itl("p95"), 1.1 * target_ms, "ms")
    if factor == SHOWN:
        sheet.judge(f"{name} p99", one.itl("p99"), 1.5 * target_ms, "ms")
        sheet.judge(f"{name} longest gap", one.itl("max"), 3 * target_ms, "ms")
        share = 100 * one.speed / lone_speed
        sheet.judge(f"{name} prompt, of its lone speed", share, 75, "%", least=True)
    if not fixed:
        return
    best = _speed_at(one.itl("p95"), list(fixed.values()))
    sheet.judge(
        f"{name} prompt, of the best fixed chunk with this p95",
        100 * one.speed / best,
        90,
        "%",
        least=True,
    )


def _speed_at(p95_ms: float, fixed: list[Point]) -> float:
    """The speed of the best fixed chunk with this 95th percentile, between those measured."""
    points = sorted((each.itl("p95"), each.speed) for each in fixed)
    best = points[0][1] * min(1.0, p95_ms / points[0][0])
    for (low_ms, low), (high_ms, high) in itertools.pairwise(points):
        if low_ms <= p95_ms:
            part = min(1.0, (p95_ms - low_ms) / max(high_ms - low_ms, 1e-9))
            best = max(best, low, low + part * (high - low))
    return best


class _Beside:
    """Streams of one server, and prompts alone and beside them."""

    def __init__(self, server: Server, plan: Plan, seed: str) -> None:
        self._server = server
        self._plan = plan
        self._seed = seed
        self._progress = Progress(0)
        self._num_probes = 0

    async def run(self, alone: int, times: int) -> Run:
        progress = self._progress
        transport = open_transport("chat-sse", self._server.target)
        try:
            async with ClientWatch() as watch:
                progress.start_s = time.perf_counter()
                for _ in range(alone):
                    await self._probe(transport, Role.PROBE_ALONE)
                await self._streams(transport, times)
                progress.end_s = time.perf_counter()
            progress.client = watch.load
        finally:
            await transport.close()
        level = Level("as_written", 0)
        return summarise(self._server.name, level, 0, progress, Slo(), streams=True)

    async def _streams(self, transport: Transport, times: int) -> None:
        samples = [self._sample(f"stream {n}", "streams", 6000) for n in range(NUM_STREAMS)]
        sends = [
            asyncio.create_task(self._send(transport, sample, STREAM_PROMPT)) for sample in samples
        ]
        try:
            for _ in range(times):
                wanted = [len(sample.pieces) + QUIET_PIECES for sample in samples]
                while any(len(s.pieces) < n for s, n in zip(samples, wanted, strict=True)):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                await self._probe(transport, Role.PROBE_BESIDE)
        finally:
            for send in sends:
                send.cancel()
            await asyncio.wait(sends)

    async def _probe(self, transport: Transport, role: Role) -> None:
        self._num_probes += 1
        sample = self._sample(f"prompt {self._num_probes}", "long-prompts", 2)
        sample.role = role
        await self._send(transport, sample, self._plan.prompt_tokens)

    def _sample(self, session: str, part: str, max_tokens: int) -> Sample:
        return Sample(session, part, 0, max_tokens, time.perf_counter())

    async def _send(self, transport: Transport, sample: Sample, num_tokens: int) -> None:
        """A stream that is given up counts with what it said until then."""
        dialogue = Dialogue(sample.session, "", ())
        dialogue.texts.append(words(num_tokens, self._seed, sample.session))
        sample.prompt_bytes = dialogue.num_bytes()
        try:
            await transport.send(dialogue, sample)
        finally:
            sample.end_s = time.perf_counter()
            self._progress.samples.append(sample)


def _report(plan: Plan, seed: str, runs: list[Run]) -> Report:
    workload = read_workload("mixed-long", None)
    description = f"{NUM_STREAMS} streams and a prompt of {plan.prompt_tokens} tokens beside them"
    return Report(
        format=FORMAT,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=this_machine(),
        workload_name="beside",
        workload=msgspec.structs.replace(workload, description=description),
        transport="chat-sse",
        seed=seed,
        warm=False,
        slo=Slo(),
        targets=[TargetInfo(run.target, "", "default") for run in runs],
        runs=runs,
        note="loadtest.examples.promises",
    )

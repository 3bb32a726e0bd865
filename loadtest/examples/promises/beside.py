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
from loadtest.measure.progress import Progress
from loadtest.measure.result import FORMAT, Level, Report, Run, TargetInfo
from loadtest.measure.sample import Role, Sample
from loadtest.measure.summary import summarise
from loadtest.report.files import write_json, write_whole
from loadtest.report.picture import picture
from loadtest.transports import Dialogue, Transport, open_transport
from loadtest.workloads import Slo, read_workload
from loadtest.workloads.text import words

NUM_STREAMS: Final = 4
STREAM_PROMPT: Final = 1600
"""As agents have. Short ones would double their steps by what they say meanwhile."""
KV_MEMORY: Final = "384MiB"
USED_PROMPTS: Final = 12
"""Together as long as the cache: every page was used before anything is measured, as it is after a
server's first minutes. First touches of memory take 0.2 ms for 2 MiB, and on a virtual machine
whose host gives it in small pages 4 ms: every sixth step would take that longer."""
STEADY: Final = ("--speculation", "off")
"""A token in each step. With drafts the pace is that of how much the streams repeat themselves, and
they soon fill the cache."""
QUIET_PIECES: Final = 100
"""Tokens of each stream before the prompt comes."""
SHOWN: Final = 3.0
"""The target that the picture shows, as a multiple of the lone time between tokens."""
NO_CHUNKS: Final = 8192
LOOK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: a long prompt at the target that is shown, and for every other target
    and for fixed chunks a shorter one, beside which the streams do not grow much."""

    prompt_tokens: int = 6000
    times: int = 1
    sweep_tokens: int = 2000
    targets: tuple[float, ...] = (1.5, 2.0, 3.0, 4.5, 6.0)
    chunks: tuple[int, ...] = (20, 32, 64, 128, 256, 512)


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

    async def point(tokens: int, times: int, name: str, *options: str, alone: int = 0) -> Point:
        async with serving(name, "--kv-memory", KV_MEMORY, *STEADY, *options) as server:
            one = Point(await _Beside(server, tokens, f"{seed}/{name}").run(alone, times))
        gaps = "".join(f"{one.itl(name):>9.1f}" for name in ("p50", "p95", "p99", "max"))
        sheet.say(f"{name:<24}{gaps}  {one.speed:>9.0f}")
        return one

    long, short = plan.prompt_tokens, plan.sweep_tokens
    sheet.say(f"{NUM_STREAMS} streams, then a prompt of {long} tokens")
    sheet.say(f"{'gaps in ms':<24}{'p50':>9}{'p95':>9}{'p99':>9}{'longest':>9}  tokens/s of prompt")
    base = await point(long, 1, "no target", alone=2)
    lone_ms = base.itl("p50", "quiet")
    lone_speed = base.run.figures["prefill_alone_tok_per_s"]
    sheet.say(f"alone: {lone_ms:.2f} ms between tokens; the prompt {lone_speed:.0f} tokens/s")
    shown = [await point(long, plan.times, *_target(SHOWN, lone_ms))]
    shown += [await point(long, 1, *_fixed(chunk)) for chunk in (512, NO_CHUNKS)]
    _judge_shown(sheet, shown[0], lone_ms, lone_speed)
    if folder is not None:
        for one in shown:
            one.run.figures["prefill_share"] = one.speed / lone_speed
        report = _report(plan, seed, [one.run for one in shown])
        write_json(report, folder / "beside.json")
        write_whole(folder / "beside.svg", picture([report]))
        sheet.say(f"wrote {folder / 'beside.json'} and {folder / 'beside.svg'}")
    if not plan.targets:
        return
    sheet.say(f"the same with prompts of {short} tokens")
    fixed = [await point(short, 2, *_fixed(chunk)) for chunk in plan.chunks]
    for factor in plan.targets:
        times = 1 if factor < SHOWN else plan.times + 1
        one = await point(short, times, *_target(factor, lone_ms))
        sheet.judge(f"target {factor:g}x: p95", one.itl("p95"), 1.1 * factor * lone_ms, "ms")
        best = _speed_at(one.itl("p95"), fixed)
        if best is None:
            sheet.say(f"  (no fixed chunk has a p95 of {one.itl('p95'):.1f} ms)")
            continue
        name = f"target {factor:g}x: prompt, of the best fixed chunk of this p95"
        sheet.judge(name, 100 * one.speed / best, 90, "%", least=True)


def _target(factor: float, lone_ms: float) -> tuple[str, str, str]:
    ms = factor * lone_ms
    return f"target {ms:.1f} ms ({factor:g}x)", "--itl-target-ms", f"{ms:.2f}"


def _fixed(chunk: int) -> tuple[str, str, str]:
    name = f"chunks of {chunk}" if chunk < NO_CHUNKS else "no chunks"
    return name, "--prefill-chunk", str(chunk)


def _judge_shown(sheet: Sheet, one: Point, lone_ms: float, lone_speed: float) -> None:
    target_ms, name = SHOWN * lone_ms, f"target {SHOWN:g}x:"
    sheet.judge(f"{name} p95", one.itl("p95"), 1.1 * target_ms, "ms")
    sheet.judge(f"{name} p99", one.itl("p99"), 1.5 * target_ms, "ms")
    sheet.judge(f"{name} longest gap", one.itl("max"), 3 * target_ms, "ms")
    share = 100 * one.speed / lone_speed
    sheet.judge(f"{name} prompt, of its lone speed", share, 75, "%", least=True)
    at_most = 100 * (1 - one.itl("p50", "quiet") / target_ms)
    sheet.say(f"  (the streams' own steps leave {at_most:.0f} % of the time)")


def _speed_at(p95_ms: float, fixed: list[Point]) -> float | None:
    """The speed of the best fixed chunk with this 95th percentile, between those measured; None
    where even the smallest one, a page, has a higher one."""
    points = sorted((each.itl("p95"), each.speed) for each in fixed)
    if p95_ms < points[0][0]:
        return None
    best = 0.0
    for (low_ms, low), (high_ms, high) in itertools.pairwise(points):
        if low_ms <= p95_ms:
            part = min(1.0, (p95_ms - low_ms) / max(high_ms - low_ms, 1e-9))
            best = max(best, low, low + part * (high - low))
    return best


class _Beside:
    """Streams of one server, and prompts alone and beside them."""

    def __init__(self, server: Server, prompt_tokens: int, seed: str) -> None:
        self._server = server
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self._progress = Progress(0)
        self._num_probes = 0

    async def run(self, alone: int, times: int) -> Run:
        progress = self._progress
        transport = open_transport("chat-sse", self._server.target)
        try:
            await self._use_pages(transport)
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

    async def _use_pages(self, transport: Transport) -> None:
        samples = [self._sample(f"first {n}", "first", 1) for n in range(USED_PROMPTS)]
        await asyncio.gather(*(self._send(transport, each, STREAM_PROMPT) for each in samples))
        self._progress.samples.clear()

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
        await self._send(transport, sample, self._prompt_tokens)

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

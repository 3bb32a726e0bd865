"""Progress while it runs: bars and current rates on a terminal, lines anywhere else."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.measure.histogram import Histogram
from loadtest.measure.progress import Progress
from loadtest.measure.result import Level
from loadtest.measure.sample import Sample
from loadtest.measure.summary import gaps_s
from loadtest.transports import Target

REFRESH_S = 0.25
WINDOW_S = 2.0
MAX_DOTS = 48


class LiveView:
    """Shows one run after another on `console`. `num_runs` are to come."""

    def __init__(self, console: Console, num_runs: int) -> None:
        self._console = console
        self._num_runs = num_runs
        self._run = 0

    @contextlib.asynccontextmanager
    async def watch(
        self, target: Target, level: Level, repeat: int, progress: Progress
    ) -> AsyncIterator[None]:
        """Shows `progress` while the block runs, and one line of it at the end."""
        self._run += 1
        title = f"[{self._run}/{self._num_runs}] {target.name}, {level}, repeat {repeat + 1}"
        try:
            if self._console.is_terminal:
                async with self._drawing(title, progress):
                    yield
            else:
                yield
        finally:
            self._console.print(_line(title, progress), highlight=False, soft_wrap=True)

    @contextlib.asynccontextmanager
    async def _drawing(self, title: str, progress: Progress) -> AsyncIterator[None]:
        drawing = _Drawing(title, progress)
        with Live(console=self._console, auto_refresh=False, transient=True) as live:

            async def refresh() -> None:
                while True:
                    live.update(drawing.draw(), refresh=True)
                    await asyncio.sleep(REFRESH_S)

            task = asyncio.create_task(refresh())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])


class _Drawing:
    """Keeps what was counted already, so that a frame costs only what is new."""

    def __init__(self, title: str, progress: Progress) -> None:
        self._title = title
        self._progress = progress
        self._num_seen = 0
        self._ttft, self._itl = Histogram(), Histogram()
        self._pieces = 0
        self._errors = 0
        self._recent: deque[tuple[float, int]] = deque()

    def draw(self) -> Group:
        progress = self._progress
        for sample in progress.samples[self._num_seen :]:
            self._pieces += len(sample.pieces)
            self._errors += sample.error is not None
            if sample.piece_s:
                self._ttft.record(sample.ttft_s)
            for gap_s in gaps_s(sample):
                self._itl.record(gap_s)
        self._num_seen = len(progress.samples)
        flying = list(progress.in_flight.values())
        total = self._pieces + sum(len(sample.pieces) for sample in flying)
        now_s = time.perf_counter()
        self._recent.append((now_s, total))
        while now_s - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        span_s = now_s - self._recent[0][0]
        rate = (total - self._recent[0][1]) / span_s if span_s else 0.0
        return Group(self._bar(), self._rates(rate, len(flying)), self._times(), _dots(flying))

    def _bar(self) -> Table:
        progress = self._progress
        done = len(progress.samples) + progress.num_skipped
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        row.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=progress.num_turns, completed=done),
            f"{done}/{progress.num_turns} turns",
        )
        return row

    def _rates(self, rate: float, num_flying: int) -> Text:
        text = Text.assemble(
            (f"{rate:8.0f}", "bold cyan"),
            " pieces/s   ",
            (str(num_flying), "bold"),
            " in flight",
            no_wrap=True,
            overflow="ellipsis",
        )
        if self._errors:
            text.append(f"   {self._errors} failed", style="bold red")
        return text

    def _times(self) -> Text:
        text = Text("    p50 / p99", no_wrap=True, overflow="ellipsis", style="dim")
        for name, histogram in (("TTFT", self._ttft), ("ITL", self._itl)):
            if histogram.count:
                text.append(f"   {name} {histogram.at(50):.0f} / {histogram.at(99):.0f} ms")
        return text


def _dots(flying: list[Sample]) -> Text:
    """One mark for each request in flight: waiting for its first piece, or streaming."""
    text = Text("         ", no_wrap=True, overflow="ellipsis")
    for sample in flying[:MAX_DOTS]:
        text.append("▰" if sample.pieces else "▱", style="cyan" if sample.pieces else "yellow")
    if len(flying) > MAX_DOTS:
        text.append(f" +{len(flying) - MAX_DOTS}")
    return text


def _line(title: str, progress: Progress) -> Text:
    """What a run came to, in one line."""
    samples = progress.samples
    wall_s = (progress.end_s or time.perf_counter()) - progress.start_s
    pieces = sum(len(sample.pieces) for sample in samples)
    errors = sum(sample.error is not None for sample in samples)
    ended = sum(not sample.interrupted for sample in samples)
    text = Text(f"{title}: {ended}/{progress.num_turns} turns, {pieces} pieces, ")
    text.append(f"{wall_s:.1f} s")
    if errors:
        text.append(f", {errors} failed", style="bold red")
    if progress.interrupted:
        text.append(", interrupted", style="bold yellow")
    return text

"""The repeats of one target at one level, put together."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.measure.histogram import Histogram
from loadtest.measure.result import Level, Run, TurnFigures
from loadtest.measure.summary import PERCENTILES

SUMMED = frozenset(
    (
        *("requests", "errors", "prompt_tokens", "cached_tokens", "output_tokens"),
        *("bytes_up", "bytes_down"),
    )
)


@dataclass(frozen=True, slots=True)
class Pooled:
    """`figures` by the names of `Run.figures`: percentiles of all durations together, sums of
    counts, medians of rates and shares."""

    target: str
    level: Level
    runs: Sequence[Run]
    figures: dict[str, float]
    histograms: dict[str, Histogram]

    @property
    def turns(self) -> list[TurnFigures]:
        """Of the first repeat that has any."""
        return next((run.turns for run in self.runs if run.turns), [])

    def counts(self, name: str) -> dict[str, int]:
        """Errors or findings (`name`) of all repeats."""
        total: Counter[str] = Counter()
        for run in self.runs:
            total.update(getattr(run, name))
        return dict(total)


def pool(runs: Iterable[Run]) -> list[Pooled]:
    """One for each pair of target and level, in the order in which they first appear."""
    together: dict[tuple[str, Level], list[Run]] = {}
    for run in runs:
        together.setdefault((run.target, run.level), []).append(run)
    return [_pool(target, level, own) for (target, level), own in together.items()]


def _pool(target: str, level: Level, runs: list[Run]) -> Pooled:
    names = dict.fromkeys(name for run in runs for name in run.figures)
    figures = {}
    for name in names:
        values = [run.figures[name] for run in runs if name in run.figures]
        figures[name] = sum(values) if name in SUMMED else statistics.median(values)
    if figures.get("prompt_tokens"):
        figures["cached_share"] = figures["cached_tokens"] / figures["prompt_tokens"]
    if figures.get("requests"):
        figures["error_rate"] = figures["errors"] / figures["requests"]
    histograms: dict[str, Histogram] = {}
    for run in runs:
        for name, encoded in run.histograms.items():
            if name not in histograms:
                histograms[name] = Histogram()
            histograms[name].merge(encoded)
    for name, histogram in histograms.items():
        figures |= {f"{name}_{label}_ms": histogram.at(p) for label, p in PERCENTILES}
        figures[f"{name}_mean_ms"] = histogram.mean()
    return Pooled(target, level, runs, figures, histograms)

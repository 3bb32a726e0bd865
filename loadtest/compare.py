"""Targets side by side: ratios of paired repeats, with how sure they are."""

import math
import statistics
from collections.abc import Sequence

from loadtest.measure.result import Level, Ratio, Run

FIGURES = (
    "ttft_p50_ms",
    "ttft_first_p50_ms",
    "ttft_later_p50_ms",
    "ttft_later_p95_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "tpot_p50_ms",
    "e2e_p50_ms",
    "itl_beside_p99_ms",
    "prefill_beside_tok_per_s",
    "prefill_tok_per_s",
    "decode_tok_per_s",
    "output_tok_per_s",
    "wall_s",
)
# Student's t, two-sided 95 per cent, for 1 to 30 degrees of freedom.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def ratios(runs: Sequence[Run]) -> list[Ratio]:
    """The first target over each other one, for each level and figure.

    A pair is one repeat of both, next to each other in time and with the same requests. Pairs in
    which a request failed or a run was interrupted are left out: a server that refuses work is
    not faster.
    """
    names = list(dict.fromkeys(run.target for run in runs))
    levels = list(dict.fromkeys(run.level for run in runs))
    whole = {
        (run.target, run.level, run.repeat): run
        for run in runs
        if not run.interrupted and not run.errors
    }
    found = []
    for level in levels:
        for other in names[1:]:
            pairs = [
                (mine, whole[other, level, repeat])
                for (target, at, repeat), mine in whole.items()
                if target == names[0] and at == level and (other, level, repeat) in whole
            ]
            for figure in FIGURES:
                ratio = _ratio(level, figure, other, names[0], pairs)
                if ratio is not None:
                    found.append(ratio)
    return found


def _ratio(
    level: Level, figure: str, baseline: str, target: str, pairs: Sequence[tuple[Run, Run]]
) -> Ratio | None:
    logs = [
        math.log(mine.figures[figure] / theirs.figures[figure])
        for mine, theirs in pairs
        if mine.figures.get(figure, 0.0) > 0 and theirs.figures.get(figure, 0.0) > 0
    ]
    if not logs:
        return None
    mean = statistics.fmean(logs)
    low = high = None
    if len(logs) > 1:
        t = T95[len(logs) - 2] if len(logs) - 2 < len(T95) else 1.96
        half = t * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - half), math.exp(mean + half)
    return Ratio(level, figure, baseline, target, len(logs), math.exp(mean), low, high)

"""What a long prompt does to the streams beside it, and they to it."""

import itertools
import statistics
from collections.abc import Sequence

from loadtest.measure.histogram import Histogram
from loadtest.measure.sample import Role, Sample
from loadtest.measure.speeds import prefill_tok_per_s


def interference(good: Sequence[Sample]) -> tuple[dict[str, Histogram], dict[str, float]]:
    """Of a workload with probes: histograms `itl_beside` and `itl_quiet`, of the streams' gaps
    that overlap a probe's prefill (from the request to its first token) and of all others; and
    figures: `prefill_alone_tok_per_s` and `prefill_beside_tok_per_s`, the medians of a probe's
    prompt tokens that no cache had over its time to first token; `prefill_share`, the second over
    the first; `streams_beside`, how many streams a prefill ran beside (median). Nothing of a
    workload without probes."""
    probes = [one for one in good if one.role is not Role.ORDINARY and one.piece_s]
    if not probes:
        return {}, {}
    windows = [(one.sent_s, one.piece_s[0]) for one in probes if one.role is Role.PROBE_BESIDE]
    histograms = {"itl_beside": Histogram(), "itl_quiet": Histogram()}
    streams = [one for one in good if one.role is Role.ORDINARY and one.streamed]
    num_beside = [0] * len(windows)
    for stream in streams:
        touched: set[int] = set()
        for begin_s, end_s in itertools.pairwise(stream.piece_s):
            over = {n for n, (a, b) in enumerate(windows) if begin_s < b and end_s > a}
            histograms["itl_beside" if over else "itl_quiet"].record(end_s - begin_s)
            touched |= over
        for number in touched:
            num_beside[number] += 1
    figures = {}
    if num_beside:
        figures["streams_beside"] = float(statistics.median(num_beside))
    for role, name in ((Role.PROBE_ALONE, "alone"), (Role.PROBE_BESIDE, "beside")):
        speeds = [
            speed
            for one in probes
            if one.role is role and (speed := prefill_tok_per_s(one)) is not None
        ]
        if speeds:
            figures[f"prefill_{name}_tok_per_s"] = statistics.median(speeds)
    alone = figures.get("prefill_alone_tok_per_s", 0.0)
    if alone and "prefill_beside_tok_per_s" in figures:
        figures["prefill_share"] = figures["prefill_beside_tok_per_s"] / alone
    return histograms, figures

"""From samples to figures."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from loadtest.measure.histogram import Histogram
from loadtest.measure.interference import interference
from loadtest.measure.progress import Progress
from loadtest.measure.result import Level, Run, Stream, TurnFigures
from loadtest.measure.sample import Sample
from loadtest.measure.speeds import decode_tok_per_s, median_prefill_tok_per_s
from loadtest.workloads.spec import Slo

PERCENTILES = (
    *(("p50", 50.0), ("p90", 90.0), ("p95", 95.0)),
    *(("p99", 99.0), ("p99_9", 99.9), ("max", 100.0)),
)
MAX_STREAMS = 64
HIT_BINS = 40


def summarise(
    target: str, level: Level, repeat: int, progress: Progress, slo: Slo, *, streams: bool
) -> Run:
    """The figures of a run, which may have been interrupted. Latencies are those of good
    requests; errors count as requests and nowhere else. `streams` keeps a timeline of the first
    requests."""
    samples = progress.samples
    good = [sample for sample in samples if sample.good]
    wall_s = max(progress.end_s - progress.start_s, 1e-9)
    histograms = _histograms(good)
    beside, figures_beside = interference(good)
    histograms |= beside
    figures = _figures(samples, good, wall_s, slo) | figures_beside
    for name, histogram in histograms.items():
        if histogram.count:
            figures |= {f"{name}_{label}_ms": histogram.at(p) for label, p in PERCENTILES}
            figures[f"{name}_mean_ms"] = histogram.mean()
    figures["client_cpu_share"] = progress.client.cpu_share
    for name, speed in (
        ("decode_tok_per_s", decode_tok_per_s(good)),
        ("prefill_tok_per_s", median_prefill_tok_per_s(good)),
    ):
        if speed is not None:
            figures[name] = speed
    if progress.pss_peak_bytes is not None:
        figures["pss_peak_mib"] = progress.pss_peak_bytes / 2**20
    failed = [sample for sample in samples if sample.error is not None]
    return Run(
        target=target,
        level=level,
        repeat=repeat,
        wall_s=wall_s,
        interrupted=progress.interrupted,
        figures={name: value for name, value in figures.items() if math.isfinite(value)},
        histograms={name: one.encode() for name, one in histograms.items() if one.count},
        turns=_turns(good),
        hits=_hits(good, progress.start_s, wall_s),
        streams=_streams(samples, progress.start_s) if streams else [],
        errors=dict(Counter(str(sample.error) for sample in failed)),
        error_examples={str(sample.error): sample.message for sample in reversed(failed)},
        findings=dict(Counter(text for sample in good for text in sample.findings())),
        num_skipped=progress.num_skipped,
        client=progress.client,
    )


def gaps_s(sample: Sample) -> Iterable[float]:
    """The times between pieces of a streamed answer."""
    if not sample.streamed:
        return ()
    times = sample.piece_s
    return (after - before for before, after in itertools.pairwise(times))


def _histograms(good: Sequence[Sample]) -> dict[str, Histogram]:
    """`ttft_first` is of first turns, `ttft_later` of the others; `send` how late the client
    itself was."""
    histograms = {name: Histogram() for name in ("ttft_first", "ttft_later", "tpot", "e2e", "send")}
    for sample in good:
        histograms["e2e"].record(sample.e2e_s)
        histograms["send"].record(sample.sent_s - sample.due_s)
        if sample.streamed and sample.piece_s:
            histograms["ttft_later" if sample.turn else "ttft_first"].record(sample.ttft_s)
        if (tpot_s := sample.tpot_s) is not None:
            histograms["tpot"].record(tpot_s)
    histograms["ttft"], histograms["itl"] = _ttft_and_itl(good)
    return histograms


def _ttft_and_itl(good: Sequence[Sample]) -> tuple[Histogram, Histogram]:
    ttft, itl = Histogram(), Histogram()
    for sample in good:
        if sample.streamed and sample.piece_s:
            ttft.record(sample.ttft_s)
        for gap_s in gaps_s(sample):
            itl.record(gap_s)
    return ttft, itl


def _figures(
    samples: Sequence[Sample], good: Sequence[Sample], wall_s: float, slo: Slo
) -> dict[str, float]:
    ended = sum(not sample.interrupted for sample in samples)
    errors = sum(sample.error is not None for sample in samples)
    usages = [usage for sample in good if (usage := sample.believed)]
    prompt = sum(usage.prompt for usage in usages)
    cached = sum(usage.cached for usage in usages)
    output = sum(sample.output_tokens for sample in good)
    kept = sum(_keeps(sample, slo) for sample in good)
    return {
        "requests": float(ended),
        "errors": float(errors),
        "error_rate": errors / ended if ended else 0.0,
        "prompt_tokens": float(prompt),
        "cached_tokens": float(cached),
        "output_tokens": float(output),
        "cached_share": cached / prompt if prompt else math.nan,
        "output_tok_per_s": output / wall_s,
        "total_tok_per_s": (prompt + output) / wall_s,
        "requests_per_s": len(good) / wall_s,
        "goodput_per_s": kept / wall_s,
        "goodput_share": kept / ended if ended else math.nan,
        "bytes_up": float(sum(sample.bytes_up for sample in samples)),
        "bytes_down": float(sum(sample.bytes_down for sample in samples)),
        "wall_s": wall_s,
    }


def _keeps(sample: Sample, slo: Slo) -> bool:
    """The request kept every limit; one without the figure that a limit asks of it keeps it."""
    limits: tuple[tuple[float | None, Callable[[], float | None]], ...] = (
        (slo.ttft_ms, lambda: sample.ttft_s if sample.streamed and sample.piece_s else None),
        (slo.tpot_ms, lambda: sample.tpot_s),
        (slo.itl_max_ms, lambda: max(gaps_s(sample), default=None)),
        (slo.e2e_ms, lambda: sample.e2e_s),
    )
    for limit_ms, figure in limits:
        if limit_ms is not None:
            value_s = figure()
            if value_s is not None and value_s * 1e3 > limit_ms:
                return False
    return True


def _turns(good: Sequence[Sample]) -> list[TurnFigures]:
    rows = []
    for turn in sorted({sample.turn for sample in good}):
        own = [sample for sample in good if sample.turn == turn]
        ttft, itl = _ttft_and_itl(own)
        usages = [usage for sample in own if (usage := sample.believed)]
        prompt = sum(usage.prompt for usage in usages)
        rows.append(
            TurnFigures(
                turn=turn,
                num_requests=len(own),
                ttft_p50_ms=ttft.at(50) if ttft.count else None,
                ttft_p90_ms=ttft.at(90) if ttft.count else None,
                ttft_max_ms=ttft.at(100) if ttft.count else None,
                itl_p50_ms=itl.at(50) if itl.count else None,
                prompt_tokens=prompt / len(usages) if usages else 0.0,
                cached_share=sum(usage.cached for usage in usages) / prompt if prompt else None,
            )
        )
    return rows


def _hits(good: Sequence[Sample], start_s: float, wall_s: float) -> list[tuple[float, float]]:
    """Pairs (seconds since the start, cached share of the prompts that were sent about then)."""
    prompt, cached = [0] * HIT_BINS, [0] * HIT_BINS
    for sample in good:
        if usage := sample.believed:
            place = int((sample.sent_s - start_s) / wall_s * HIT_BINS)
            place = min(max(place, 0), HIT_BINS - 1)
            prompt[place] += usage.prompt
            cached[place] += usage.cached
    width_s = wall_s / HIT_BINS
    return [
        (round((place + 0.5) * width_s, 3), round(cached[place] / prompt[place], 4))
        for place in range(HIT_BINS)
        if prompt[place]
    ]


def _streams(samples: Sequence[Sample], start_s: float) -> list[Stream]:
    def ms(time_s: float) -> float:
        return round((time_s - start_s) * 1e3, 1)

    return [
        Stream(
            session=f"{sample.part} {sample.session}",
            turn=sample.turn,
            due_ms=ms(sample.due_s),
            first_ms=ms(sample.piece_s[0]) if sample.piece_s else None,
            end_ms=ms(sample.end_s),
            gaps_ms=[round(gap_s * 1e3, 1) for gap_s in gaps_s(sample)],
            error="interrupted" if sample.interrupted else sample.error,
        )
        for sample in sorted(samples, key=lambda one: one.due_s)[:MAX_STREAMS]
    ]

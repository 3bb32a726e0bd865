"""Percentiles and a table of one run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from loadtest.client import Sample

COLUMNS = (
    ("conc", "concurrency", "{:d}"),
    ("req", "num_requests", "{:d}"),
    ("err", "num_errors", "{:d}"),
    ("TTFT first p50 ms", "ttft_first_p50_ms", "{:.0f}"),
    ("TTFT later p50 ms", "ttft_later_p50_ms", "{:.0f}"),
    ("p95", "ttft_later_p95_ms", "{:.0f}"),
    ("ITL p50 ms", "itl_p50_ms", "{:.1f}"),
    ("p99", "itl_p99_ms", "{:.1f}"),
    ("max", "itl_max_ms", "{:.0f}"),
    ("out tok/s", "output_tokens_per_s", "{:.0f}"),
    ("cached", "cached_share", "{:.1%}"),
    ("wall s", "wall_s", "{:.1f}"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One concurrency's figures. `first` is each agent's first turn, `later` the others.

    `cached_share` is cached prompt tokens over prompt tokens, as the server reports them.
    """

    concurrency: int
    num_requests: int
    num_errors: int
    ttft_first_p50_ms: float
    ttft_later_p50_ms: float
    ttft_later_p95_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    output_tokens_per_s: float
    cached_share: float
    wall_s: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(concurrency: int, samples: Sequence[Sample], wall_s: float) -> Row:
    """The row of one run; failed requests count as errors and nowhere else."""
    good = [sample for sample in samples if sample.error is None]
    first = [sample.ttft_s * 1e3 for sample in good if sample.turn == 0 and sample.text]
    later = [sample.ttft_s * 1e3 for sample in good if sample.turn > 0 and sample.text]
    gaps = [gap * 1e3 for sample in good for gap in sample.gaps_s]
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    return Row(
        concurrency=concurrency,
        num_requests=len(samples),
        num_errors=len(samples) - len(good),
        ttft_first_p50_ms=percentile(first, 50),
        ttft_later_p50_ms=percentile(later, 50),
        ttft_later_p95_ms=percentile(later, 95),
        itl_p50_ms=percentile(gaps, 50),
        itl_p99_ms=percentile(gaps, 99),
        itl_max_ms=max(gaps, default=float("nan")),
        output_tokens_per_s=sum(sample.output_tokens for sample in good) / wall_s,
        cached_share=sum(sample.cached_tokens for sample in good) / max(prompt_tokens, 1),
        wall_s=wall_s,
    )


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, aligned."""
    cells = [[title for title, _, _ in COLUMNS]]
    cells += [[form.format(asdict(row)[name]) for _, name, form in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(lines)

"""The final table, as Markdown that also reads well in a terminal, however narrow."""

from collections.abc import Iterable, Sequence

from loadtest.measure.pooled import Pooled, pool
from loadtest.measure.result import Ratio, Report
from loadtest.workloads.spec import Slo

COLUMNS = (
    ("requests", "requests", "{:.0f}"),
    ("errors", "errors", "{:.0f}"),
    ("TTFT first p50 ms", "ttft_first_p50_ms", "{:.0f}"),
    ("TTFT later p50 ms", "ttft_later_p50_ms", "{:.0f}"),
    ("TTFT p99 ms", "ttft_p99_ms", "{:.0f}"),
    ("ITL p50 ms", "itl_p50_ms", "{:.1f}"),
    ("ITL p99 ms", "itl_p99_ms", "{:.1f}"),
    ("ITL max ms", "itl_max_ms", "{:.0f}"),
    ("out tok/s", "output_tok_per_s", "{:.1f}"),
    ("total tok/s", "total_tok_per_s", "{:.0f}"),
    ("cached", "cached_share", "{:.1%}"),
    ("goodput", "goodput_share", "{:.0%}"),
    ("PSS MiB", "pss_peak_mib", "{:.0f}"),
)
RATIO_TITLES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_first_p50_ms": "TTFT p50, first turn",
    "ttft_later_p50_ms": "TTFT p50, later turns",
    "ttft_later_p95_ms": "TTFT p95, later turns",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "tpot_p50_ms": "TPOT p50",
    "e2e_p50_ms": "end to end p50",
    "itl_beside_p99_ms": "ITL p99 beside a prefill",
    "prefill_beside_tok_per_s": "prefill beside streams",
    "prefill_tok_per_s": "prefill tok/s",
    "decode_tok_per_s": "decode tok/s",
    "output_tok_per_s": "output tok/s",
    "wall_s": "wall time",
    "pss_peak_mib": "memory",
}
MEANINGLESS = 100.0
BESIDE_COLUMNS = (
    ("streams", "streams_beside", "{:.0f}"),
    ("quiet p50", "itl_quiet_p50_ms", "{:.1f} ms"),
    ("p99", "itl_quiet_p99_ms", "{:.1f} ms"),
    ("beside p50", "itl_beside_p50_ms", "{:.1f} ms"),
    ("p95", "itl_beside_p95_ms", "{:.1f} ms"),
    ("p99", "itl_beside_p99_ms", "{:.1f} ms"),
    ("max", "itl_beside_max_ms", "{:.1f} ms"),
    ("prefill tok/s alone", "prefill_alone_tok_per_s", "{:.0f}"),
    ("beside", "prefill_beside_tok_per_s", "{:.0f}"),
    ("of alone", "prefill_share", "{:.0%}"),
)


def cell(pooled: Pooled, figure: str, form: str) -> str:
    """A figure as text, a dash where there is no data."""
    value = pooled.figures.get(figure)
    return "-" if value is None else form.format(value)


def figures_table(measured: Sequence[Pooled], width: int | None = None) -> str:
    """A row for each target and level; columns without any data are left out. What is wider than
    `width` is turned on its side."""
    return fitted(*table_of(measured, COLUMNS), width)


def beside_table(measured: Sequence[Pooled], width: int | None = None) -> str:
    """Gaps of the streams in quiet and beside a prefill, and the prefill's speed; "" for a
    workload without probes."""
    titles, rows = table_of(measured, BESIDE_COLUMNS)
    return fitted(titles, rows, width) if len(titles) > 2 else ""


def table_of(
    measured: Sequence[Pooled], columns: Sequence[tuple[str, str, str]]
) -> tuple[list[str], list[list[str]]]:
    """Titles and rows; columns without any data are left out."""
    shown = [column for column in columns if any(column[1] in one.figures for one in measured)]
    rows = [
        [str(one.level), one.target, *(cell(one, name, form) for _, name, form in shown)]
        for one in measured
    ]
    return ["load", "target", *(title for title, _, _ in shown)], rows


def ratio_text(ratio: Ratio) -> str:
    """`0.52 (0.49-0.55)`; an interval that says nothing is called that."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.2f}"
    if ratio.high > MEANINGLESS * ratio.low:
        return f"{ratio.ratio:.2f} (unsure)"
    return f"{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def ratios_table(ratios: Sequence[Ratio]) -> str:
    """A row for each level and figure, a column for each peer; "" without ratios."""
    if not ratios:
        return ""
    peers = list(dict.fromkeys(ratio.baseline for ratio in ratios))
    by_row: dict[tuple[str, str], dict[str, str]] = {}
    for ratio in ratios:
        row = by_row.setdefault((str(ratio.level), RATIO_TITLES[ratio.figure]), {})
        row[ratio.baseline] = ratio_text(ratio)
    rows = [[*key, *(row.get(peer, "-") for peer in peers)] for key, row in by_row.items()]
    return markdown(
        ["load", "ratio", *(f"{ratios[0].target} / {peer}" for peer in peers)], rows, num_left=2
    )


def goodput_counts(slo: Slo) -> str:
    """Which requests goodput counts."""
    limits = ", ".join(
        f"{name} {value:g}"
        for name in slo.__struct_fields__
        if (value := getattr(slo, name)) is not None
    )
    return f"requests that kept {limits}" if limits else "every answered request: no limit is given"


def notes(report: Report) -> list[str]:
    """What a reader must know before believing the figures, most serious first."""
    said = []
    if report.interrupted:
        said.append("Interrupted: these are the figures of what had run until then.")
    said += [
        f"{one.name} was not measured, as GET {one.url}/v1/models failed: {one.dead}"
        for one in report.targets
        if one.dead
    ]
    for pooled in pool(report.runs):
        where = f"{pooled.target}, {pooled.level}"
        for kind, count in pooled.counts("errors").items():
            example = next(
                run.error_examples[kind] for run in pooled.runs if kind in run.error_examples
            )
            said.append(f"{where}: {count} requests failed ({kind}). First: {example}")
        if skipped := sum(run.num_skipped for run in pooled.runs):
            said.append(
                f"{where}: {skipped} turns were not sent: a turn before them had failed, or the "
                "streams beside which they belong had ended."
            )
        for finding, count in pooled.counts("findings").items():
            said.append(
                f"{where}: usage of {count} answers is not to be believed ({finding}); "
                "pieces of text are counted instead, and no prompt."
            )
        if busy := [run.client for run in pooled.runs if run.client.overloaded]:
            worst = max(busy, key=lambda load: load.cpu_share)
            said.append(
                f"{where}: the client itself was overloaded ({worst.cpu_share:.0%} of a core, "
                f"{worst.lag_p50_ms:.0f} ms behind): latencies are partly its own."
            )
    said += [
        f"Does not hold: {one.expression} ({one.target}, {one.level}: "
        + ("no data)" if one.value is None else f"{one.value:.4g})")
        for one in report.verdicts
        if not one.holds
    ]
    return said


def fitted(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """A table whose first two columns name its rows, as it is where it fits into `width`; else a
    column for each of its rows, in as many tables as are needed."""
    whole = markdown(titles, rows, num_left=2)
    if width is None or len(whole.partition("\n")[0]) <= width:
        return whole
    tables: list[str] = []
    begin = 0
    while begin < len(rows):
        end = len(rows)
        while True:
            turned = list(zip(titles, *rows[begin:end], strict=True))
            table = markdown(turned[0], turned[1:], num_left=1)
            if end == begin + 1 or len(table.partition("\n")[0]) <= width:
                break
            end -= 1
        tables.append(table)
        begin = end
    return "\n\n".join(tables)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 0) -> str:
    """An aligned Markdown table; the first `num_left` columns read from the left."""
    cells = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    lines = [
        "| "
        + " | ".join(
            text.ljust(width) if i < num_left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|".join(
        "-" * (width + 2) if i < num_left else "-" * (width + 1) + ":"
        for i, width in enumerate(widths)
    )
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])

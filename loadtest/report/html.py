"""One self-contained page: nothing is fetched, no script runs, it follows the reader's theme."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadtest.arrival import Recorded
from loadtest.measure.pooled import Pooled, pool
from loadtest.measure.result import Ratio, Report
from loadtest.report import plots
from loadtest.report.readme import machine_text
from loadtest.report.table import (
    BESIDE_COLUMNS,
    COLUMNS,
    RATIO_TITLES,
    cell,
    goodput_counts,
    notes,
    ratio_text,
    table_of,
)
from loadtest.workloads.spec import Replay

NUM_COLOURS = 6
TILES = (
    ("First token, first turn", "ttft_first_p50_ms", "{:.0f}", "ms"),
    ("First token, later turns", "ttft_later_p50_ms", "{:.0f}", "ms"),
    ("Between tokens, p50", "itl_p50_ms", "{:.1f}", "ms"),
    ("Between tokens, p99", "itl_p99_ms", "{:.1f}", "ms"),
    ("Output", "output_tok_per_s", "{:.0f}", "tok/s"),
    ("Prompt from cache", "cached_share", "{:.0%}", ""),
)
BESIDE_TILES = (
    ("Between tokens in quiet, p50", "itl_quiet_p50_ms", "{:.1f}", "ms"),
    ("Beside a long prompt, p50", "itl_beside_p50_ms", "{:.1f}", "ms"),
    ("Beside a long prompt, p99", "itl_beside_p99_ms", "{:.1f}", "ms"),
    ("Prefill alone", "prefill_alone_tok_per_s", "{:.0f}", "tok/s"),
    ("Prefill beside streams", "prefill_beside_tok_per_s", "{:.0f}", "tok/s"),
)
METHOD = {
    "First token (TTFT)": "from when the workload wanted the request sent to the first text that "
    "came off the socket. A client or a queue that is late shows here and nowhere else.",
    "Between tokens (ITL)": "the time between two pieces of one answer; TPOT is its mean over an "
    "answer, by the tokens the server counts.",
    "Percentiles": "from HDR histograms with three digits, over all repeats together; rates are "
    "medians of repeats; failed requests count as errors and in no latency.",
    "Ratios": "geometric means of paired repeats that ran next to each other, with the 95 % "
    "interval of Student's t. Servers take turns at being first.",
}


def page(report: Report) -> str:
    """The whole page, also of a report that was interrupted or has no runs at all."""
    measured = pool(report.runs)
    names = [target.name for target in report.targets]
    body = [_head(report)]
    if measured:
        body += [
            _tiles(report, measured),
            _sweep(measured, names),
            _beside(measured),
            _levels(measured, names),
            _tables(report, measured),
        ]
    body.append(_method(report))
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load test: {escape(report.workload_name)}</title>"
        f"<style>{style}{_tab_rules(len(_levels_of(measured)))}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(report: Report) -> str:
    versus = " vs ".join(target.name for target in report.targets)
    facts = [
        machine_text(report.machine),
        report.made,
        f"transport {report.transport}",
        f"seed {report.seed}",
        *(_scale(part) for part in report.workload.parts if isinstance(part, Replay)),
        "caches filled before each run" if report.warm else "new prefixes for each run",
    ]
    warnings = "".join(f"<li>{escape(note)}</li>" for note in notes(report))
    return (
        f"<h1>{escape(report.workload_name)}: {escape(versus)}</h1>"
        f'<p class="lead">{escape(report.workload.description)}.</p>'
        f'<p class="facts">{escape(" · ".join(facts))}</p>'
        + (f'<p class="facts">{escape(report.note)}</p>' if report.note else "")
        + (f'<ul class="notes">{warnings}</ul>' if warnings else "")
    )


def _scale(part: Replay) -> str:
    """What a replay made of its trace."""
    pace = ""
    if isinstance(part.arrival, Recorded) and part.arrival.speed != 1:
        pace = f", arrivals {part.arrival.speed:g} times as fast"
    waits = f", tool waits divided by {part.speed:g}" if part.format == "tracelab" else ""
    return f"{part.trace}: lengths divided by {part.scale:g}{pace}{waits}"


def _tiles(report: Report, measured: Sequence[Pooled]) -> str:
    """The first target's figures at the highest load, with its ratio to each other target."""
    level = _levels_of(measured)[-1]
    first, *others = [one for one in measured if str(one.level) == level]
    ratios = {(r.figure, r.baseline): r for r in report.ratios if str(r.level) == level}
    tiles = []
    for title, name, form, unit in BESIDE_TILES if "streams_beside" in first.figures else TILES:
        if name not in first.figures:
            continue
        peers = "".join(
            f'<div class="peer">{escape(other.target)} <b>{cell(other, name, form)}</b> {unit}'
            f"{_ratio_words(ratios.get((name, other.target)))}</div>"
            for other in others
        )
        tiles.append(
            f'<div class="tile"><div class="name">{title}</div><div class="value">'
            f"{cell(first, name, form)}<small>{unit}</small></div>{peers}</div>"
        )
    heading = f"{first.target}, {level}" if len(_levels_of(measured)) > 1 else first.target
    return f'<h2>{escape(heading)}</h2><div class="tiles">{"".join(tiles)}</div>'


def _ratio_words(ratio: Ratio | None) -> str:
    """`2.1x faster`; in a colour where the interval leaves no doubt."""
    if ratio is None:
        return ""
    rate = ratio.figure.endswith("_per_s")
    better = (ratio.ratio > 1) == rate
    factor = ratio.ratio if ratio.ratio >= 1 else 1 / ratio.ratio
    words = ("more" if ratio.ratio > 1 else "less") if rate else "faster" if better else "slower"
    sure = ratio.low is not None and ratio.high is not None and not ratio.low < 1 < ratio.high
    style = ("better" if better else "worse") if sure else ""
    title = f"ratio {ratio_text(ratio)} of {ratio.num_pairs} pairs"
    return f'<br><b class="{style}" title="{escape(title)}">{factor:.2f}&times; {words}</b>'


def _sweep(measured: Sequence[Pooled], names: Sequence[str]) -> str:
    levels = _levels_of(measured)
    if len(levels) < 2:
        return ""
    by_target = {
        _series(name, names): own
        for name in names
        if (own := [one for one in measured if one.target == name])
    }
    p50_p99 = "p50, p99 dashed; the figure is p50 at the highest load"
    figures = [
        plots.sweep(
            "First token against load",
            p50_p99,
            (("ttft_p50_ms", ""), ("ttft_p99_ms", "dashed")),
            by_target,
            levels,
            is_time=True,
        ),
        plots.sweep(
            "Between tokens against load",
            p50_p99,
            (("itl_p50_ms", ""), ("itl_p99_ms", "dashed")),
            by_target,
            levels,
            is_time=True,
        ),
        plots.sweep(
            "Output tokens per second against load",
            "all streams together",
            (("output_tok_per_s", ""),),
            by_target,
            levels,
            is_time=False,
        ),
        plots.sweep(
            "End to end against load",
            p50_p99,
            (("e2e_p50_ms", ""), ("e2e_p99_ms", "dashed")),
            by_target,
            levels,
            is_time=True,
        ),
    ]
    return f'<h2>Against load</h2><div class="plots">{"".join(figures)}</div>'


def _beside(measured: Sequence[Pooled]) -> str:
    """Of a workload with probes: the streams' gaps in quiet and beside a prefill."""
    titles, rows = table_of(measured, BESIDE_COLUMNS)
    if len(titles) <= 2:
        return ""
    return "<h2>Streams beside a long prompt</h2>" + _table(titles, rows)


def _levels(measured: Sequence[Pooled], names: Sequence[str]) -> str:
    """Tabs, without a script: a radio button for each level, the highest one chosen."""
    levels = _levels_of(measured)
    buttons, sections = [], []
    for number, level in enumerate(levels):
        checked = " checked" if number == len(levels) - 1 else ""
        buttons.append(
            f'<input type="radio" name="level" id="level{number}"{checked}>'
            f'<label for="level{number}">{escape(level)}</label>'
        )
        own = [one for one in measured if str(one.level) == level]
        series = [_series(one.target, names) for one in own]
        runs = [one.runs[0] for one in own]
        end_ms = max((stream.end_ms for run in runs for stream in run.streams), default=0.0)
        figures = [
            plots.distribution("First token", "ttft", own, series),
            plots.distribution("Between tokens", "itl", own, series),
            plots.beside(own, series)
            or plots.per_turn(own, series)
            or plots.distribution("End to end", "e2e", own, series),
            plots.hits(own, series),
            *(plots.timeline(run, n, end_ms) for run, n in zip(runs, series, strict=True)),
        ]
        sections.append(f'<section class="level{number}">{"".join(figures)}</section>')
    return f'<h2>In detail</h2><div class="tabs">{"".join(buttons + sections)}</div>'


def _tab_rules(count: int) -> str:
    return "".join(
        f"#level{n}:checked~.level{n}{{display:grid;gap:12px;"
        "grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}"
        for n in range(count)
    )


def _tables(report: Report, measured: Sequence[Pooled]) -> str:
    text = "<h2>All figures</h2>" + _table(*table_of(measured, COLUMNS))
    if report.ratios:
        text += "<h2>Ratios</h2>" + _ratios(report.ratios)
    if report.verdicts:
        rows = [
            [
                str(v.level),
                v.target,
                v.expression,
                "no data" if v.value is None else f"{v.value:.4g}",
                "holds" if v.holds else "does not hold",
            ]
            for v in report.verdicts
        ]
        text += "<h2>Assertions</h2>" + _table(["load", "target", "must hold", "is", ""], rows)
    return text


def _ratios(ratios: Sequence[Ratio]) -> str:
    """A row for each figure and peer, a column for each load."""
    levels = list(dict.fromkeys(str(ratio.level) for ratio in ratios))
    by_row: dict[tuple[str, str], dict[str, str]] = {}
    for ratio in ratios:
        key = (RATIO_TITLES[ratio.figure], f"{ratio.target} / {ratio.baseline}")
        by_row.setdefault(key, {})[str(ratio.level)] = ratio_text(ratio)
    rows = [[*key, *(row.get(level, "-") for level in levels)] for key, row in by_row.items()]
    pairs = max(ratio.num_pairs for ratio in ratios)
    hint = f'<p class="facts">of {pairs} pairs each, with 95 % intervals</p>' if pairs > 1 else ""
    return _table(["figure", "of", *levels], rows) + hint


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _method(report: Report) -> str:
    terms = "".join(
        f"<div><dt>{escape(t)}</dt><dd>{escape(text)}</dd></div>" for t, text in METHOD.items()
    )
    counts = escape(goodput_counts(report.slo))
    goodput = f"<div><dt>Goodput</dt><dd>{counts}.</dd></div>"
    return f'<h2>How it was measured</h2><dl class="method">{terms}{goodput}</dl>'


def _levels_of(measured: Sequence[Pooled]) -> list[str]:
    return list(dict.fromkeys(str(one.level) for one in measured))


def _series(name: str, names: Sequence[str]) -> int:
    return list(names).index(name) % NUM_COLOURS

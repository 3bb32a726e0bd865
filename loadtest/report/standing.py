"""Where one server stands among its peers: one table of several reports."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.measure.pooled import Pooled, pool
from loadtest.measure.result import Level, Report
from loadtest.report.table import RATIO_TITLES, markdown, ratio_text

_FORMS = (
    ("_per_s", "{:,.0f}"),
    ("_ms", "{:,.0f} ms"),
    ("_mib", "{:,.0f} MiB"),
    ("_s", "{:,.1f} s"),
)


@dataclass(frozen=True, slots=True)
class _Row:
    workload: str
    level: Level
    figure: str


def standing_table(reports: Sequence[Report]) -> str:
    """Markdown. The first target of the first report stands beside the targets of all others; the
    best of them is bold, and the ratio is to it: of paired repeats, where a report has both."""
    ours = reports[0].targets[0].name
    measured = {
        name: pool(run for report in reports if report.workload_name == name for run in report.runs)
        for name in dict.fromkeys(report.workload_name for report in reports)
    }
    peers = [
        name
        for name in dict.fromkeys(target.name for report in reports for target in report.targets)
        if name != ours
    ]
    shown = {report.workload_name: report.workload.shows for report in reports}
    rows = [
        _Row(name, level, figure)
        for name, pooled in measured.items()
        for level in sorted({one.level for one in pooled})
        for figure in shown[name]
    ]
    return markdown(
        ["load", "figure", ours, *peers, f"{ours} / best peer"],
        [_cells(row, reports, measured[row.workload], ours, peers) for row in rows],
        num_left=2,
    )


def _cells(
    row: _Row, reports: Sequence[Report], measured: Sequence[Pooled], ours: str, peers: list[str]
) -> list[str]:
    values = {
        one.target: one.figures[row.figure]
        for one in measured
        if one.level == row.level and row.figure in one.figures
    }
    theirs = {name: values[name] for name in peers if name in values}
    choose = max if row.figure.endswith("_per_s") else min
    best = choose(theirs, key=lambda name: theirs[name], default=None)
    ratio = "-"
    if best is not None and ours in values:
        ratio = _ratio(row, reports, best) or f"{values[ours] / theirs[best]:.2f}"
    texts = {name: figure_text(row.figure, value) for name, value in values.items()}
    if best is not None:
        texts[best] = f"**{texts[best]}**"
    cells = [texts.get(name, "-") for name in (ours, *peers)]
    level = f", {row.level}" if row.level.kind != "as_written" else ""
    title = RATIO_TITLES.get(row.figure, row.figure)
    return [f"{row.workload}{level}", title, *cells, ratio]


def _ratio(row: _Row, reports: Sequence[Report], best: str) -> str | None:
    """As the report that has both tells it."""
    for report in reports:
        for ratio in report.ratios if report.workload_name == row.workload else ():
            if (ratio.level, ratio.figure, ratio.baseline) == (row.level, row.figure, best):
                return ratio_text(ratio)
    return None


def figure_text(figure: str, value: float) -> str:
    """`1,234`, `12 ms`, `3.4 s`: a figure with the unit that its name ends in."""
    for ending, form in _FORMS:
        if figure.endswith(ending):
            return form.format(value)
    return f"{value:g}"

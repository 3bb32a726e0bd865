"""Pictures of their own, for a README: the streams' gaps beside a long prompt, and how throughput
grows with the number of streams."""

from collections.abc import Mapping, Sequence
from html import escape

from loadtest.measure.pooled import Pooled, pool
from loadtest.measure.result import Report
from loadtest.report.plots import FIRST_PERCENTILE
from loadtest.report.svg import Chart, even_axis, linear_axis, log_axis, milliseconds

_WIDTH, _LINE = 520, 17
# Colours of the page, in both of its looks: a picture in a README follows the reader's.
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#5b6776}.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:#dfe4ea}.line{fill:none;stroke-width:2}.ground{fill:#fff}
.s0{stroke:#1f6fd6}.s1{stroke:#d96a00}.s2{stroke:#15936b}.s3{stroke:#8250c8}.s4{stroke:#c2334d}
.s5{stroke:#7a6a00}.limit{stroke:#8795a5;stroke-dasharray:5 4}
@media(prefers-color-scheme:dark){text{fill:#9aa7b6}.grid{stroke:#2c3744}.ground{fill:#18202a}
.s0{stroke:#6cabff}.s1{stroke:#ffa24d}.s2{stroke:#57d3a5}.s3{stroke:#bf9bff}.s4{stroke:#ff8296}
.s5{stroke:#d9c64a}}
"""


def picture(reports: Sequence[Report], limits: Mapping[int, float] | None = None) -> str:
    """An SVG file of what the reports have: gaps beside a prefill, else throughput by streams.
    `limits` is what the machine allows at most in tokens per second, by number of streams. Raises
    ValueError for reports that have neither."""
    measured = pool(run for report in reports for run in report.runs)
    if beside := [one for one in measured if "itl_beside" in one.histograms]:
        return _gaps(beside)
    if decode := [one for one in measured if one.level.value and "decode_tok_per_s" in one.figures]:
        return _throughput(decode, limits or {})
    raise ValueError(
        "nothing ran beside a prefill, as in `mixed`, nor at numbers of streams, as in `decode`"
    )


def _gaps(measured: Sequence[Pooled]) -> str:
    """What share of gaps between tokens is below each value while a prompt is computed, and a
    line of figures for each target."""
    values = [
        value
        for one in measured
        for value in (one.histograms["itl_beside"].at(p) for p in (FIRST_PERCENTILE, 100))
    ]
    title = "Time between tokens of running streams while a long prompt is computed"
    chart = Chart(
        log_axis(values, milliseconds), linear_axis(0, 1, lambda share: f"{share:.0%}"), title
    )
    for number, one in enumerate(measured):
        chart.line(list(one.histograms["itl_beside"].curve()), number)
    return _framed(chart, [(f"s{number}", _figures(one)) for number, one in enumerate(measured)])


def _throughput(measured: Sequence[Pooled], limits: Mapping[int, float]) -> str:
    """Tokens per second by number of streams, a line for each target and one for the limit."""
    streams = sorted({int(one.level.value) for one in measured})
    speeds: dict[str, dict[int, float]] = {}
    for one in measured:
        own = speeds.setdefault(one.target, {})
        own[int(one.level.value)] = one.figures["decode_tok_per_s"]
    limits = {count: limits[count] for count in streams if count in limits}
    values = [speed for own in (*speeds.values(), limits) for speed in own.values()]
    title = "Tokens per second by number of streams"
    x = even_axis([f"{count} stream{'s' * (count > 1)}" for count in streams])
    chart = Chart(x, log_axis(values, "{:g}".format), title)
    keys = []
    for number, (name, own) in enumerate(speeds.items()):
        chart.line([(streams.index(count), own[count]) for count in sorted(own)], number)
        keys.append((f"s{number}", f"{name}: {_shares(own, limits)}"))
    if limits:
        chart.line([(streams.index(count), limits[count]) for count in sorted(limits)], 0, "limit")
        keys.append(("limit", "what memory and arithmetic of this machine allow at most"))
    return _framed(chart, keys)


def _shares(own: Mapping[int, float], limits: Mapping[int, float]) -> str:
    """`250 tok/s (80% of the limit) at 1, 1,010 (27%) at 16`."""
    said: list[str] = []
    for count in sorted({min(own), max(own)}):
        words = ("", "") if said else (" tok/s", " of the limit")
        share = f" ({own[count] / limits[count]:.0%}{words[1]})" if count in limits else ""
        said.append(f"{own[count]:,.0f}{words[0]}{share} at {count}")
    return ", ".join(said)


def _framed(chart: Chart, keys: Sequence[tuple[str, str]]) -> str:
    """The chart on its own ground, with a line of text for each pair of class and text."""
    lines = []
    for number, (style, text) in enumerate(keys):
        y = 270 + _LINE * number
        lines.append(f'<path class="line {style}" d="M20 {y - 4}h18"/>')
        lines.append(f'<text x="46" y="{y}">{escape(text)}</text>')
    height = 278 + _LINE * len(keys)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="8"/>'
        f'<svg width="{_WIDTH}" height="250">{chart.svg()}</svg>{"".join(lines)}</svg>\n'
    )


def _figures(one: Pooled) -> str:
    """`target: p50 20 ms, p95 30 ms, longest 40 ms; prefill at 60 % of its lone speed`."""
    figures = one.figures
    gaps = ", ".join(
        f"{name} {figures[f'itl_beside_{key}_ms']:.0f} ms"
        for name, key in (("p50", "p50"), ("p95", "p95"), ("longest", "max"))
    )
    share = figures.get("prefill_share")
    prefill = "" if share is None else f"; prefill at {share:.0%} of its lone speed"
    return f"{one.target}: {gaps}{prefill}"

"""A picture of its own, for a README: the streams' gaps beside a long prompt, for each target."""

from html import escape

from loadtest.measure.pooled import Pooled, pool
from loadtest.measure.result import Report
from loadtest.report.plots import FIRST_PERCENTILE
from loadtest.report.svg import Chart, linear_axis, log_axis, milliseconds

_WIDTH, _LINE = 520, 17
# Colours of the page, in both of its looks: a picture in a README follows the reader's.
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#5b6776}.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:#dfe4ea}.line{fill:none;stroke-width:2}.ground{fill:#fff}
.s0{stroke:#1f6fd6}.s1{stroke:#d96a00}.s2{stroke:#15936b}.s3{stroke:#8250c8}.s4{stroke:#c2334d}
@media(prefers-color-scheme:dark){text{fill:#9aa7b6}.grid{stroke:#2c3744}.ground{fill:#18202a}
.s0{stroke:#6cabff}.s1{stroke:#ffa24d}.s2{stroke:#57d3a5}.s3{stroke:#bf9bff}.s4{stroke:#ff8296}}
"""


def picture(report: Report) -> str:
    """An SVG file: what share of gaps between tokens is below each value while a prompt is
    computed, and a line of figures for each target. Raises ValueError for a report without."""
    measured = [one for one in pool(report.runs) if "itl_beside" in one.histograms]
    if not measured:
        raise ValueError("nothing ran beside a prefill: the picture needs a workload like `mixed`")
    values = [
        value
        for one in measured
        for value in (one.histograms["itl_beside"].at(p) for p in (FIRST_PERCENTILE, 100))
    ]
    title = "Time between tokens of running streams while a long prompt is computed"
    chart = Chart(
        log_axis(values, milliseconds), linear_axis(0, 1, lambda share: f"{share:.0%}"), title
    )
    keys = []
    for number, one in enumerate(measured):
        chart.line(list(one.histograms["itl_beside"].curve()), number)
        y = 270 + _LINE * number
        keys.append(f'<path class="line s{number}" d="M20 {y - 4}h18"/>')
        keys.append(f'<text x="46" y="{y}">{escape(_figures(one))}</text>')
    height = 278 + _LINE * len(measured)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="8"/>'
        f'<svg width="{_WIDTH}" height="250">{chart.svg()}</svg>{"".join(keys)}</svg>\n'
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

"""The plots of the page, each a figure of HTML, "" where there is nothing to draw."""

from collections.abc import Sequence
from html import escape

from loadtest.measure.pooled import Pooled
from loadtest.measure.result import Run, Stream, TurnFigures
from loadtest.report.svg import Chart, Point, even_axis, linear_axis, log_axis, milliseconds

MAX_CURVE_POINTS = 160
# Pieces that came in one read are 0 ms apart: an axis from there would be mostly empty.
FIRST_PERCENTILE = 5.0
ROW = 13
TIMELINE_WIDTH = 1100


def figure(title: str, hint: str, keys: Sequence[tuple[int, str, str]], picture: str) -> str:
    """A card; `keys` are (series, name, what to read off) of its legend."""
    legend = "".join(
        f'<li><i class="key s{series}"></i>{escape(name)} <b>{escape(text)}</b></li>'
        for series, name, text in keys
    )
    return (
        f'<figure><figcaption><h3>{escape(title)}</h3><p class="hint">{escape(hint)}</p>'
        f'<ul class="keys">{legend}</ul></figcaption>{picture}</figure>'
    )


def distribution(title: str, name: str, measured: Sequence[Pooled], series: list[int]) -> str:
    """What share of all durations is below each value: a curve for each target."""
    curves = [
        (number, one, name, "")
        for number, one in zip(series, measured, strict=True)
        if name in one.histograms
    ]
    return _distributions(title, "share of all below; further left is faster", curves)


def beside(measured: Sequence[Pooled], series: list[int]) -> str:
    """The streams' gaps while a long prompt is computed, and in quiet (dashed)."""
    curves = [
        (number, one, name, style)
        for number, one in zip(series, measured, strict=True)
        for name, style in (("itl_beside", ""), ("itl_quiet", "dashed"))
        if name in one.histograms
    ]
    hint = "share of all below, while a long prompt is computed; dashed: in quiet"
    return _distributions("Between tokens beside a prefill", hint, curves)


def _distributions(title: str, hint: str, curves: list[tuple[int, Pooled, str, str]]) -> str:
    """A curve for each (series, pool, name of its histogram, style); only full ones have keys."""
    values = []
    for _, one, name, _ in curves:
        histogram = one.histograms[name]
        values += [histogram.at(FIRST_PERCENTILE), histogram.at(100)]
    if not values:
        return ""
    chart = Chart(
        log_axis(values, milliseconds), linear_axis(0, 1, lambda share: f"{share:.0%}"), title
    )
    keys = []
    for number, one, name, style in curves:
        chart.line(_steps(_thin(list(one.histograms[name].curve()))), number, style)
        if style:
            continue
        marks = [(one.figures[f"{name}_p{p}_ms"], p) for p in (50, 99)]
        dots = [((ms, p / 100), f"{one.target}: p{p} {ms:.1f} ms") for ms, p in marks]
        chart.dots(dots, number)
        keys.append((number, one.target, " · ".join(f"p{p} {_short(ms)}" for ms, p in marks)))
    return figure(title, hint, keys, chart.svg())


def sweep(
    title: str,
    hint: str,
    lines: Sequence[tuple[str, str]],
    by_target: dict[int, list[Pooled]],
    levels: Sequence[str],
    *,
    is_time: bool,
) -> str:
    """Figures against load. `lines` are pairs (figure, style)."""
    points: list[tuple[int, str, str, list[Point]]] = []
    for number, measured in by_target.items():
        for name, style in lines:
            own = [
                (float(levels.index(str(one.level))), one.figures[name])
                for one in measured
                if one.figures.get(name, 0.0) > 0
            ]
            points.append((number, name, style, own))
    values = [value for *_, own in points for _, value in own]
    if not values:
        return ""
    y = log_axis(values, milliseconds) if is_time else linear_axis(0, max(values), "{:g}".format)
    texts = levels if len(levels) <= 4 else [level.partition(" ")[0] for level in levels]
    chart = Chart(even_axis(texts), y, title)
    for number, name, style, own in points:
        chart.line(own, number, style)
        if not style:
            chart.dots([(at, f"{name}: {at[1]:.1f}") for at in own], number)
    keys = []
    for number, measured in by_target.items():
        last = measured[-1].figures.get(lines[0][0])
        text = "" if last is None else _short(last) if is_time else f"{last:.0f}"
        keys.append((number, measured[0].target, text))
    return figure(title, hint, keys, chart.svg())


def per_turn(measured: Sequence[Pooled], series: list[int]) -> str:
    """Time to first token by turn: a line for the median, dashes for p90."""
    rows: list[tuple[int, Pooled, list[TurnFigures]]] = [
        (number, one, [turn for turn in one.turns if turn.ttft_p50_ms])
        for number, one in zip(series, measured, strict=True)
    ]
    values = [
        ms
        for *_, turns in rows
        for turn in turns
        for ms in (turn.ttft_p50_ms, turn.ttft_p90_ms)
        if ms
    ]
    indices = sorted({turn.turn for *_, turns in rows for turn in turns})
    if len(indices) < 2:
        return ""
    texts = [str(index + 1) if len(indices) <= 12 or not index % 5 else "" for index in indices]
    title = "First token by turn"
    chart = Chart(even_axis(texts), log_axis(values, milliseconds), title)
    keys = []
    for number, one, turns in rows:
        places = [float(indices.index(turn.turn)) for turn in turns]
        medians = [(at, turn.ttft_p50_ms or 0.0) for at, turn in zip(places, turns, strict=True)]
        high = [(at, turn.ttft_p90_ms or 0.0) for at, turn in zip(places, turns, strict=True)]
        texts = [
            f"{one.target}, turn {turn.turn + 1}: p50 {turn.ttft_p50_ms:.1f} ms of "
            f"{turn.num_requests} requests, {turn.prompt_tokens:.0f} prompt tokens"
            for turn in turns
        ]
        chart.line(medians, number)
        chart.line(high, number, "dashed")
        chart.dots(list(zip(medians, texts, strict=True)), number)
        if medians:
            keys.append((number, one.target, f"turn {turns[-1].turn + 1} {_short(medians[-1][1])}"))
    return figure(title, "median, p90 dashed; a prefix cache bends it down", keys, chart.svg())


def hits(measured: Sequence[Pooled], series: list[int]) -> str:
    """The share of prompt tokens that came from the cache, over the first repeat."""
    lines = [(number, one, one.runs[0].hits) for number, one in zip(series, measured, strict=True)]
    end_s = max((time_s for *_, points in lines for time_s, _ in points), default=0.0)
    if not end_s:
        return ""
    title = "Prompt tokens from cache"
    chart = Chart(
        linear_axis(0, end_s, lambda time_s: f"{time_s:g} s"),
        linear_axis(0, 1, lambda share: f"{share:.0%}"),
        title,
    )
    keys = []
    for number, one, points in lines:
        chart.line(points, number)
        chart.dots([(at, f"{one.target}: {at[1]:.0%} at {at[0]:.1f} s") for at in points], number)
        share = one.figures.get("cached_share")
        keys.append((number, one.target, "not reported" if share is None else f"{share:.0%}"))
    return figure(title, "as the server reports them, by when it was asked", keys, chart.svg())


def timeline(run: Run, series: int, end_ms: float) -> str:
    """Every token of the first requests: a row for each session, a stroke for each piece."""
    rows = list(dict.fromkeys(stream.session for stream in run.streams))
    if not rows or end_ms <= 0:
        return ""
    height = len(rows) * ROW + 24
    scale = (TIMELINE_WIDTH - 8) / end_ms
    waits, strokes, faults = [], [], []
    for stream in run.streams:
        y = rows.index(stream.session) * ROW + 3
        x = stream.due_ms * scale + 4
        until = stream.end_ms if stream.first_ms is None else stream.first_ms
        waits.append(f"M{x:.1f} {y + 4}H{until * scale + 4:.1f}")
        strokes += _strokes(stream, scale, y)
        if stream.error:
            faults.append(f"M{stream.end_ms * scale + 1:.1f} {y}l6 8m0 -8l-6 8")
    axis = ""
    for time_s, text in linear_axis(0, end_ms / 1e3, lambda time_s: f"{time_s:g} s").ticks:
        if time_s * 1e3 <= end_ms:
            x = max(time_s * 1e3 * scale + 4, 14)
            axis += f'<text class="tick middle" x="{x:.1f}" y="{height - 4}">{text}</text>'
    return (
        f'<figure class="full"><figcaption><h3><i class="key s{series}"></i>'
        f"{escape(run.target)}: every token of {len(rows)} streams</h3>"
        '<p class="hint">a row for each conversation; grey is waiting for the first token, each '
        'stroke is a piece of answer</p></figcaption><div class="wide">'
        f'<svg viewBox="0 0 {TIMELINE_WIDTH} {height}" role="img" aria-label="tokens over time">'
        f'<path class="wait" d="{"".join(waits)}"/>'
        f'<path class="stroke s{series}" d="{"".join(strokes)}"/>'
        f'<path class="fault" d="{"".join(faults)}"/>{axis}</svg></div></figure>'
    )


def _strokes(stream: Stream, scale: float, y: int) -> list[str]:
    if stream.first_ms is None:
        return []
    at_ms = stream.first_ms
    strokes = [f"M{at_ms * scale + 4:.1f} {y}v8"]
    for gap_ms in stream.gaps_ms:
        at_ms += gap_ms
        strokes.append(f"M{at_ms * scale + 4:.1f} {y}v8")
    return strokes


def _thin(curve: list[Point]) -> list[Point]:
    """At most MAX_CURVE_POINTS of a curve, its ends among them."""
    if len(curve) <= MAX_CURVE_POINTS:
        return curve
    step = (len(curve) - 1) / (MAX_CURVE_POINTS - 1)
    return [curve[round(index * step)] for index in range(MAX_CURVE_POINTS)]


def _steps(curve: list[Point]) -> list[Point]:
    """A distribution rises at its values and is flat between them."""
    points: list[Point] = []
    before = 0.0
    for value, share in curve:
        points += [(value, before), (value, share)]
        before = share
    return points


def _short(ms: float) -> str:
    if ms >= 1e3:
        return f"{ms / 1e3:.2f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"

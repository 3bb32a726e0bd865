"""Just enough of charts: two axes and lines in SVG. Colours come from the page's style."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 12, 34
MAX_TICKS = 6

Point = tuple[float, float]


def milliseconds(value: float) -> str:
    """`0.5 ms`, `20 ms`, `1.5 s`."""
    return f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps `low`..`high` to 0..1; `ticks` are pairs of a value and its text."""

    low: float
    high: float
    log: bool
    ticks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """Where a value is; what lies outside is put on the edge."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


def log_axis(values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """Around positive values, with ticks at 1, 2 and 5 of each decade, or fewer."""
    low, high = min(values) / 1.1, max(values) * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        marks = [step * 10.0**decade for decade in decades for step in steps]
        inside = [mark for mark in marks if low <= mark <= high]
        if len(inside) <= MAX_TICKS:
            break
    if len(inside) < 2:
        low = max(mark for mark in marks if mark <= low)
        high = min([mark for mark in marks if mark >= high] or [high])
        inside = [low, *(mark for mark in inside if low < mark < high), high]
    return Axis(low, high, True, [(mark, text(round(mark, 6))) for mark in inside])


def linear_axis(low: float, high: float, text: Callable[[float], str]) -> Axis:
    """From `low` to at least `high`, with ticks at round steps."""
    rough = max(high - low, 1e-9) / (MAX_TICKS - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    count = math.ceil(round((high - low) / step, 9)) or 1
    marks = [low + index * step for index in range(count + 1)]
    return Axis(low, marks[-1], False, [(mark, text(round(mark, 6))) for mark in marks])


def even_axis(texts: Sequence[str]) -> Axis:
    """Places 0, 1, 2.. for things in order."""
    last = max(len(texts) - 1, 0)
    return Axis(-0.4, last + 0.4, False, list(enumerate(texts)))


@dataclass(slots=True)
class Chart:
    """A chart under construction; series are numbered as the page's colours are."""

    x: Axis
    y: Axis
    title: str
    marks: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """In the picture's units."""
        x = LEFT + self.x.place(point[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - self.y.place(point[1]) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    def line(self, points: Sequence[Point], series: int, style: str = "") -> None:
        """A line through the points; nothing without any."""
        if points:
            path = "L".join(f"{x} {y}" for x, y in map(self.at, points))
            self.marks.append(f'<path class="line s{series} {style}" d="M{path}"/>')

    def dots(self, points: Sequence[tuple[Point, str]], series: int) -> None:
        """A dot for each point, with a text that shows under the pointer."""
        for point, text in points:
            x, y = self.at(point)
            self.marks.append(
                f'<circle class="dot s{series}" cx="{x}" cy="{y}" r="4">'
                f"<title>{escape(text)}</title></circle>"
            )

    def svg(self) -> str:
        """The picture."""
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
        ]
        for value, text in self.y.ticks:
            _, y = self.at((self.x.low, value))
            parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{y + 4}">{escape(text)}</text>')
        for value, text in self.x.ticks:
            x, _ = self.at((value, self.y.low))
            parts.append(f'<path class="grid" d="M{x} {HEIGHT - BOTTOM}v5"/>')
            place = "end" if x > WIDTH - RIGHT - 12 else "middle"
            below = HEIGHT - BOTTOM + 21
            parts.append(f'<text class="tick {place}" x="{x}" y="{below}">{escape(text)}</text>')
        return "".join([*parts, *self.marks, "</svg>"])

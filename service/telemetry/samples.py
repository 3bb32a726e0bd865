"""What is counted: plain integers and floats, so that counting costs next to nothing.

An observation costs 0.1 µs here, 5 µs with an OpenTelemetry instrument; histograms that the
engine keeps could not be told through one at all. OpenTelemetry's data model is what comes out.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.telemetry.metric_list import Metric

Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Buckets:
    """`counts[i]`: observations at most `bounds[i]` and above the bound before it; the last is
    of those above all bounds. `total` is the sum of the observations."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric's value for one set of labels, in the order of `metric.labels`."""

    metric: Metric
    labels: Labels
    value: float | Buckets


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class Counts:
    """Counters and histograms of the event loop's making."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Metric, Labels], float] = {}
        self._histograms: dict[tuple[Metric, Labels], _Histogram] = {}

    def add(self, metric: Metric, labels: Labels, number: float = 1) -> None:
        """Raise a counter."""
        key = metric, labels
        self._numbers[key] = self._numbers.get(key, 0) + number

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Take a value into a histogram."""
        histogram = self._histogram(metric, labels)
        histogram.counts[bisect_left(metric.bounds, value)] += 1
        histogram.total += value

    def observe_all(self, metric: Metric, labels: Labels, values: NDArray[np.float64]) -> None:
        """Take an array of values into a histogram."""
        histogram = self._histogram(metric, labels)
        places = np.bincount(
            np.searchsorted(metric.bounds, values), minlength=len(histogram.counts)
        )
        histogram.counts = [a + b for a, b in zip(histogram.counts, places.tolist(), strict=True)]
        histogram.total += float(values.sum())

    def samples(self) -> Iterator[Sample]:
        """All that was counted so far."""
        for (metric, labels), number in self._numbers.items():
            yield Sample(metric, labels, number)
        for (metric, labels), histogram in self._histograms.items():
            counts = tuple(histogram.counts)
            yield Sample(metric, labels, Buckets(metric.bounds, counts, histogram.total))

    def _histogram(self, metric: Metric, labels: Labels) -> _Histogram:
        key = metric, labels
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = _Histogram(metric.bounds)
        return histogram

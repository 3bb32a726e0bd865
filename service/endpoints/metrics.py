"""`GET /metrics`: what is counted, as text that Prometheus reads."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.telemetry import metric_list as m
from service.telemetry.metrics import Metrics
from service.telemetry.samples import Buckets, Labels, Sample
from service.transport.http import send_answer


class MetricsEndpoint:
    """`GET /metrics`: Prometheus's text, or OpenMetrics where the client prefers it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encode, content_type = choose_encoder(Headers(scope=scope).get("accept", ""))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Given(await self._metrics.collect()))
        await send_answer(send, 200, encode(registry), content_type=content_type)


class _Given(Collector):
    """Samples that were collected already, as a collector."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_metric: dict[m.Metric, list[tuple[Labels, float | Buckets]]] = {}
        for sample in samples:
            self._by_metric.setdefault(sample.metric, []).append((sample.labels, sample.value))

    def describe(self) -> Iterator[Family]:
        """Nothing: the registry is asked once."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Each metric that has samples, as a family."""
        for metric in m.METRICS:
            if metric in self._by_metric:
                yield _family(metric, self._by_metric[metric])


def _family(metric: m.Metric, values: list[tuple[Labels, float | Buckets]]) -> Family:
    labels = [name.replace(".", "_") for name in metric.labels]
    if metric.kind is m.Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.prometheus, metric.help, labels=labels)
        for given, value in values:
            assert isinstance(value, Buckets)
            histogram.add_metric(given, _cumulative(value), value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is m.Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.prometheus, metric.help, labels=labels)
    for given, value in values:
        assert not isinstance(value, Buckets)
        family.add_metric(given, value)
    return family


def _cumulative(buckets: Buckets) -> list[tuple[str, float]]:
    """Prometheus's buckets: at most each bound, and all."""
    told: list[tuple[str, float]] = []
    num = 0
    names = [*map(_number, buckets.bounds), "+Inf"]
    for name, count in zip(names, buckets.counts, strict=True):
        num += count
        told.append((name, float(num)))
    return told


def _number(bound: float) -> str:
    return repr(round(bound, 9))

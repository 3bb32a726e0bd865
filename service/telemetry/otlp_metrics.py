"""The samples as OpenTelemetry's data model, exported over OTLP at an interval."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from service.telemetry import metric_list as m
from service.telemetry.exporting import LAST_TRY_S
from service.telemetry.metrics import Metrics
from service.telemetry.samples import Buckets, Sample
from service.telemetry.span_attributes import PROVIDER_NAME

log = logging.getLogger(__name__)


class MetricsExport:
    """Sends what is counted to a collector, off the event loop; one that is away is told of once,
    tried again at the next interval, and nothing is lost, as counts only add up."""

    def __init__(self, metrics: Metrics, exporter: MetricExporter, interval_s: float) -> None:
        self._metrics = metrics
        self._exporter = exporter
        self._interval_s = interval_s
        self._away = False
        self._ended = threading.Lock()
        self._start_ns = time.time_ns()
        self._resource = Resource.create()

    async def run(self) -> None:
        """Export until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.export()

    async def export(self) -> None:
        """Send all samples as of now, trying again for a few seconds."""
        samples = await self._metrics.collect()
        try:
            result = await asyncio.to_thread(self._exporter.export, self._data(samples))
        except Exception:
            log.exception("metrics were not exported")
            return
        away = result is not MetricExportResult.SUCCESS
        if away and not self._away:
            log.warning("the metrics collector does not answer; it is asked again and again")
        elif self._away and not away:
            log.info("the metrics collector answers again")
        self._away = away

    async def end(self) -> None:
        """Send what was counted last, within LAST_TRY_S; not where the collector is away."""
        if not self._away:
            timer = threading.Timer(LAST_TRY_S, self.close)
            timer.daemon = True
            timer.start()
            await self.export()
            timer.cancel()
        self.close()

    def close(self) -> None:
        """End tries under way. Callable again."""
        if self._ended.acquire(blocking=False):
            self._exporter.shutdown()

    def _data(self, samples: Iterable[Sample]) -> MetricsData:
        by_metric: dict[m.Metric, list[Sample]] = {}
        for sample in samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        told = [self._metric(metric, found) for metric, found in by_metric.items()]
        scope = ScopeMetrics(InstrumentationScope(PROVIDER_NAME), told, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, metric: m.Metric, samples: list[Sample]) -> Metric:
        cumulative = AggregationTemporality.CUMULATIVE
        data: Gauge | Histogram | Sum
        if metric.kind is m.Kind.HISTOGRAM:
            data = Histogram([self._histogram(sample) for sample in samples], cumulative)
        elif metric.kind is m.Kind.COUNTER:
            data = Sum([self._number(sample) for sample in samples], cumulative, True)
        else:
            data = Gauge([self._number(sample) for sample in samples])
        return Metric(metric.name, metric.help, metric.unit, data)

    def _number(self, sample: Sample) -> NumberDataPoint:
        assert not isinstance(sample.value, Buckets)
        labels = _labels(sample)
        return NumberDataPoint(labels, self._start_ns, time.time_ns(), sample.value)

    def _histogram(self, sample: Sample) -> HistogramDataPoint:
        buckets = sample.value
        assert isinstance(buckets, Buckets)
        # The least and the most are not kept; the protocol can say so, the SDK's type cannot.
        unknown: Any = None
        return HistogramDataPoint(
            _labels(sample),
            self._start_ns,
            time.time_ns(),
            sum(buckets.counts),
            buckets.total,
            buckets.counts,
            buckets.bounds,
            min=unknown,
            max=unknown,
        )


def _labels(sample: Sample) -> dict[str, str]:
    """Without the empty ones, which Prometheus wants and OpenTelemetry does not."""
    pairs = zip(sample.metric.labels, sample.labels, strict=True)
    return {name: value for name, value in pairs if value}

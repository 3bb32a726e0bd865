"""OTLP exporters over HTTP or gRPC, as the standard OTEL_* variables ask; made bearable where no
collector answers: one warning, and a quick end."""

import logging
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

LAST_TRY_S = 1.0
"""How long the last spans and samples may be tried again once the server has ended."""

_GRPC = "opentelemetry.exporter.otlp.proto.grpc"

log = logging.getLogger(__name__)


class ExportError(Exception):
    """What is asked for is not installed; the message says how it would be."""


def span_exporter(protocol: str) -> "PatientExporter":
    """Raises ExportError for gRPC without its package."""
    if protocol == "grpc":
        return PatientExporter(_grpc("trace_exporter").OTLPSpanExporter())
    return PatientExporter(OTLPSpanExporter())


def metric_exporter(protocol: str) -> MetricExporter:
    """Raises ExportError for gRPC without its package."""
    if protocol == "grpc":
        exporter: MetricExporter = _grpc("metric_exporter").OTLPMetricExporter()
        return exporter
    return OTLPMetricExporter()


def _grpc(name: str) -> Any:
    try:
        return import_module(f"{_GRPC}.{name}")
    except ImportError:
        raise ExportError(
            "OTEL_EXPORTER_OTLP_PROTOCOL asks for grpc, which needs `pip install "
            "'headwater[otlp-grpc]'`; http/protobuf works without."
        ) from None


class PatientExporter(SpanExporter):
    """Another exporter, without its complaints.

    A collector that is away is told once, and once more when it is back; spans of the time between
    are lost.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._away = False
        self._ended = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send, trying again for a few seconds."""
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            log.warning("the trace collector does not answer; traces are lost until it does")
        elif self._away and not away:
            log.info("the trace collector answers again")
        self._away = away
        return result

    def end_soon(self) -> None:
        """From LAST_TRY_S on, or at once where nobody answers, nothing is tried again."""
        if self._away:
            self.shutdown()
        else:
            timer = threading.Timer(LAST_TRY_S, self.shutdown)
            timer.daemon = True
            timer.start()

    def shutdown(self) -> None:
        """End tries under way; what is exported later is lost. Callable again."""
        if self._ended.acquire(blocking=False):
            self._exporter.shutdown()

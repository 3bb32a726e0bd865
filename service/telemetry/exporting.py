"""The OTLP exporter, made bearable where no collector answers: one warning, and a quick end."""

import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

LAST_TRY_S = 1.0
"""How long the last spans may be tried again once the server has ended."""

log = logging.getLogger(__name__)


class PatientExporter(SpanExporter):
    """OTLP over HTTP, as the OTEL_EXPORTER_OTLP_* variables say.

    A collector that is away is told once, and once more when it is back; spans of the time between
    are lost.
    """

    def __init__(self) -> None:
        self._exporter = OTLPSpanExporter()
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
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

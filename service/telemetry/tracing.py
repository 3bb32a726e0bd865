"""One SERVER span per request with a child for each phase, built from integers when it has ended.

The request path only stamps nanoseconds into a `RequestRecord`; spans are made on a thread of
their own (about 50 µs each in the Python SDK), so neither the event loop nor the engine waits.
The exporter, resource and sampler are configured by the standard OTEL_* variables.
Conventions: OpenTelemetry GenAI attributes; phases carry no gen_ai.* names, so that dashboards
that sum over spans do not count a request twice.
"""

import logging
import queue
import threading
import time

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.types import Phase
from service.events import RequestRecord
from service.telemetry.exporting import PatientExporter

PROVIDER_NAME = "headwater"
MAX_PENDING_RECORDS = 4096

log = logging.getLogger(__name__)


class RequestTracer:
    """Turns records into spans on its own thread; records beyond the bound are dropped, counted."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """`exporter` defaults to OTLP over HTTP as the OTEL_EXPORTER_OTLP_* variables say."""
        self._provider = TracerProvider()
        self._exporter = exporter or PatientExporter()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(PROVIDER_NAME)
        self._propagator = TraceContextTextMapPropagator()
        self._pending: queue.Queue[RequestRecord | None] = queue.Queue(MAX_PENDING_RECORDS)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._build_all, name="tracing", daemon=True)
        self._thread.start()

    def finish(self, record: RequestRecord) -> None:
        """Hand over a record, which the caller no longer changes."""
        try:
            self._pending.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Build what is pending, flush the exporter and end the thread."""
        self._pending.put(None)
        self._thread.join(timeout=10)
        if isinstance(self._exporter, PatientExporter):
            self._exporter.end_soon()
        self._provider.shutdown()

    def _build_all(self) -> None:
        while (record := self._pending.get()) is not None:
            try:
                self._build(record)
            except Exception:
                log.exception("a trace could not be built")

    def _build(self, record: RequestRecord) -> None:
        epoch = time.time_ns() - time.monotonic_ns()
        root = self._tracer.start_span(
            f"{record.operation} {record.model}",
            context=self._parent(record),
            kind=SpanKind.SERVER,
            attributes=request_attributes(record),
            start_time=epoch + record.start_ns,
        )
        if root.is_recording():
            self._describe_outcome(root, record, epoch)
            inside = set_span_in_context(root, Context())
            for phase in record.phases:
                self._child(phase, inside, epoch)
        root.end(end_time=epoch + record.end_ns)

    def _parent(self, record: RequestRecord) -> Context:
        carrier = {"traceparent": record.traceparent or "", "tracestate": record.tracestate or ""}
        return self._propagator.extract(carrier, context=Context())

    def _child(self, phase: Phase, inside: Context, epoch: int) -> None:
        attributes: dict[str, int | str] = {"openinference.span.kind": "CHAIN"}
        if phase.num_tokens:
            attributes["headwater.tokens"] = phase.num_tokens
        if phase.name == "prefill":
            attributes["headwater.start_position"] = phase.start_position
        span = self._tracer.start_span(
            phase.name, context=inside, attributes=attributes, start_time=epoch + phase.start_ns
        )
        span.end(end_time=epoch + phase.end_ns)

    def _describe_outcome(self, root: Span, record: RequestRecord, epoch: int) -> None:
        if record.first_token_ns:
            root.add_event("first_token", timestamp=epoch + record.first_token_ns)
        if record.disconnected_ns:
            root.add_event("client_disconnected", timestamp=epoch + record.disconnected_ns)
        if record.num_replayed_tokens:
            root.set_attribute("headwater.prompt.replayed_tokens", record.num_replayed_tokens)
        if record.num_preemptions:
            root.set_attribute("headwater.preemptions", record.num_preemptions)
        if record.error_type:
            root.set_attribute("error.type", record.error_type)
            root.set_status(Status(StatusCode.ERROR))


def request_attributes(record: RequestRecord) -> dict[str, int | float | str | bool | list[str]]:
    """GenAI attributes of the request's span; what is unknown is left out, never made up."""
    attributes: dict[str, int | float | str | bool | list[str]] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER_NAME,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "headwater.stream.frames": record.num_frames,
        "headwater.stream.bytes": record.num_bytes,
        **{f"gen_ai.request.{name}": value for name, value in record.options.items()},
    }
    if record.stream:
        attributes["gen_ai.request.stream"] = True
    optional = {
        "gen_ai.response.id": record.response_id,
        "gen_ai.conversation.id": record.conversation_id,
        "gen_ai.request.previous_response.id": record.previous_response_id,
        "headwater.request.id": record.request_id,
    }
    attributes.update({name: value for name, value in optional.items() if value})
    if record.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [record.finish_reason.value]
    if record.cache is not None:
        attributes["headwater.cache.reason"] = record.cache.reason or "none"
        attributes["headwater.cache.position"] = record.cache.position
        attributes["headwater.cache.in_flight_tokens"] = record.cache.num_in_flight_tokens
        attributes["headwater.cache.disk_tokens"] = record.cache.num_disk_tokens
        if record.cache.reason == "evicted":
            attributes["headwater.cache.evicted_ago_s"] = record.cache.evicted_ago_s
    if record.usage is not None:
        written = record.usage.prompt_tokens - record.usage.cached_tokens
        attributes["gen_ai.usage.input_tokens"] = record.usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.usage.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.usage.cached_tokens
        # The convention renamed this attribute; dashboards know the former name.
        attributes["gen_ai.usage.cache_write.input_tokens"] = written
        attributes["gen_ai.usage.cache_creation.input_tokens"] = written
    if record.first_token_ns:
        attributes["gen_ai.response.time_to_first_chunk"] = (
            record.first_token_ns - record.start_ns
        ) / 1e9
    return attributes

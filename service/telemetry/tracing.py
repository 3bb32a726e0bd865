"""One SERVER span per request with a child for each phase, built from integers when it has ended.

The request path only stamps nanoseconds into a `RequestRecord`; spans are made on a thread of
their own (about 50 µs each in the Python SDK), so neither the event loop nor the engine waits.
The exporter, resource and sampler are configured by the standard OTEL_* variables. Phases carry
no gen_ai.* names, so that dashboards that sum over spans do not count a request twice.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.types import Phase
from service.events import RequestRecord
from service.telemetry.content import content_attributes
from service.telemetry.exporting import PatientExporter
from service.telemetry.sinks import Gathering
from service.telemetry.span_attributes import (
    PROVIDER_NAME,
    Attributes,
    phase_attributes,
    request_attributes,
)

MAX_PENDING_RECORDS: Final = 4096
MAX_KNOWN_RESPONSES: Final = 8192
"""Responses whose span a later one may link to."""

log = logging.getLogger(__name__)


class _Ids(RandomIdGenerator):
    """Gives a trace the number that the log has told already."""

    trace_number = 0

    def generate_trace_id(self) -> int:
        """Of the next trace that no caller began."""
        return self.trace_number


class RequestTracer:
    """A `RecordSink` that makes spans on its own thread; records beyond the bound are dropped,
    counted."""

    def __init__(self, exporter: SpanExporter, *, address: str = "", port: int = 0) -> None:
        """`address` and `port` are where the server listens."""
        self._ids = _Ids()
        self._provider = TracerProvider(id_generator=self._ids)
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(PROVIDER_NAME)
        self._propagator = TraceContextTextMapPropagator()
        self._server: Attributes = {"server.address": address, "server.port": port}
        self._known: OrderedDict[str, SpanContext] = OrderedDict()
        self._gathering = Gathering()
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
                if choices := self._gathering.add(record):
                    self._build(choices)
            except Exception:
                log.exception("a trace could not be built")

    def _build(self, choices: list[RequestRecord]) -> None:
        record, many = choices[0], len(choices) > 1
        epoch = time.time_ns() - time.monotonic_ns()
        self._ids.trace_number = record.trace_number
        root = self._tracer.start_span(
            f"{record.operation} {record.model}".strip(),
            context=self._context(record.traceparent, record.tracestate),
            kind=SpanKind.SERVER,
            attributes=self._server,
            links=self._links(record),
            start_time=epoch + record.start_ns,
        )
        if root.is_recording():
            root.set_attributes(request_attributes(choices))
            root.set_attributes(content_attributes(choices))
            for each in choices:
                span = self._choice(each, root, epoch) if many and each.usage else root
                _add_events(span, each, epoch)
                if span is not root or not many:
                    self._phases(each, span, epoch)
                if span is not root:
                    span.end(end_time=epoch + each.end_ns)
            _set_status(root, choices)
            self._remember(choices, root.get_span_context())
        root.end(end_time=epoch + max(each.end_ns for each in choices))

    def _choice(self, record: RequestRecord, root: Span, epoch: int) -> Span:
        """The span of one of several generations, with its phases inside."""
        return self._tracer.start_span(
            f"choice {record.choice}",
            context=set_span_in_context(root, Context()),
            attributes={"openinference.span.kind": "CHAIN"},
            start_time=epoch + record.start_ns,
        )

    def _phases(self, record: RequestRecord, parent: Span, epoch: int) -> None:
        inside = set_span_in_context(parent, Context())
        for phase in record.phases:
            span = self._tracer.start_span(
                phase.name,
                context=inside,
                attributes=phase_attributes(phase, record),
                start_time=epoch + phase.start_ns,
            )
            span.end(end_time=epoch + phase.end_ns)

    def _links(self, record: RequestRecord) -> list[Link]:
        """To the response it continues, to the one whose pages it took, to its connection."""
        links: list[Link] = []
        for kind, response_id in (
            ("previous_response", record.previous_response_id),
            ("cache_donor", record.donor),
        ):
            known = self._known.get(response_id or "")
            if known is not None:
                links.append(Link(known, {"headwater.link": kind}))
        if record.connection_traceparent:
            began = self._context(record.connection_traceparent, None)
            links.append(
                Link(get_current_span(began).get_span_context(), {"headwater.link": "connection"})
            )
        return links

    def _remember(self, choices: list[RequestRecord], context: SpanContext) -> None:
        for record in choices:
            if record.response_id:
                self._known[record.response_id] = context
        while len(self._known) > MAX_KNOWN_RESPONSES:
            self._known.popitem(last=False)

    def _context(self, traceparent: str | None, tracestate: str | None) -> Context:
        carrier = {"traceparent": traceparent or "", "tracestate": tracestate or ""}
        return self._propagator.extract(carrier, context=Context())


def _add_events(span: Span, record: RequestRecord, epoch: int) -> None:
    for phase in _requeued(record.phases):
        span.add_event("preempted", timestamp=epoch + phase.start_ns)
    for phase in record.phases:
        if phase.num_disk_tokens:
            restored = {"headwater.tokens": phase.num_disk_tokens}
            span.add_event("restored", restored, epoch + phase.end_ns)
    if record.first_token_ns:
        span.add_event("first_token", timestamp=epoch + record.first_token_ns)
    if record.disconnected_ns:
        span.add_event("client_disconnected", timestamp=epoch + record.disconnected_ns)


def _requeued(phases: list[Phase]) -> list[Phase]:
    """The queue phases after the first: a request that ran was preempted there."""
    return [phase for phase in phases if phase.name == "queue"][1:]


def _set_status(root: Span, choices: list[RequestRecord]) -> None:
    """A client that leaves is no error of the request's."""
    for record in choices:
        if record.error_type:
            root.set_attribute("error.type", record.error_type)
            root.set_status(Status(StatusCode.ERROR))
            return

"""Spans built from records, and received over real OTLP."""

import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from engine.scripted import ScriptedCore, in_order
from engine.transport import start_thread_engine
from engine.types import FinishReason, Phase
from service.config import Settings
from service.events import RequestRecord, Usage
from service.services import build_services
from service.telemetry import tracing
from service.telemetry.metric_list import DROPPED
from service.telemetry.tracing import RequestTracer
from tests.service.conftest import INFO, byte_assets

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


def record(**changes: object) -> RequestRecord:
    now = time.monotonic_ns()
    built = RequestRecord(operation="chat", model="tiny", start_ns=now - 10_000, end_ns=now)
    built.phases = [
        Phase("tokenize", now - 10_000, now - 9_000, 12),
        Phase("queue", now - 9_000, now - 8_000),
        Phase("prefill", now - 8_000, now - 5_000, 8, 4),
        Phase("decode", now - 5_000, now, 3),
    ]
    for name, value in changes.items():
        setattr(built, name, value)
    return built


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[RequestTracer]:
    yield (tracer := RequestTracer(exporter, address="127.0.0.1", port=8000))
    tracer.close()


def built(
    tracer: RequestTracer, exporter: InMemorySpanExporter, one: RequestRecord
) -> dict[str, ReadableSpan]:
    tracer.finish(one)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_server_span_with_its_phases_inside(
    tracer: RequestTracer, exporter: InMemorySpanExporter
) -> None:
    one = record(usage=Usage(12, 4, 3), finish_reason=FinishReason.STOP)
    spans = built(tracer, exporter, one)
    root = spans.pop("chat tiny")
    assert root.kind is SpanKind.SERVER
    assert set(spans) == {"tokenize", "queue", "prefill", "decode"}
    assert root.context is not None and root.start_time and root.end_time
    for span in spans.values():
        assert span.parent is not None and span.parent.span_id == root.context.span_id
        assert span.start_time and span.end_time
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    covered = sum((s.end_time or 0) - (s.start_time or 0) for s in spans.values())
    assert covered == root.end_time - root.start_time
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 12
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert root.attributes["gen_ai.usage.cache_write.input_tokens"] == 8
    assert root.attributes["gen_ai.usage.cache_creation.input_tokens"] == 8
    assert root.attributes["server.address"] == "127.0.0.1"
    assert root.attributes["server.port"] == 8000
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert (spans["prefill"].attributes or {})["headwater.start_position"] == 4


@pytest.mark.parametrize("flags", ["00", "01", "03", "ff"])
def test_the_callers_trace_is_continued_whatever_its_flags(
    tracer: RequestTracer, exporter: InMemorySpanExporter, flags: str
) -> None:
    one = record(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-{flags}")
    spans = built(tracer, exporter, one)
    if int(flags, 16) & 1:
        root = spans["chat tiny"]
        assert root.context is not None and root.context.trace_id == int(TRACE_ID, 16)
        assert root.parent is not None and root.parent.span_id == int(PARENT_ID, 16)
    else:
        assert not spans, "the default sampler follows the caller, who does not sample"


def test_a_trace_of_its_own_has_the_id_that_the_log_tells(
    tracer: RequestTracer, exporter: InMemorySpanExporter
) -> None:
    one = record()
    root = built(tracer, exporter, one)["chat tiny"]
    assert root.context is not None and f"{root.context.trace_id:032x}" == one.trace_id


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_a_broken_traceparent_starts_a_trace_of_its_own(
    tracer: RequestTracer, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    root = built(tracer, exporter, record(traceparent=traceparent))["chat tiny"]
    assert root.parent is None


def test_a_failed_request_says_so(tracer: RequestTracer, exporter: InMemorySpanExporter) -> None:
    one = record(error_type="server_error", finish_reason=FinishReason.ERROR, disconnected_ns=1)
    root = built(tracer, exporter, one)["chat tiny"]
    assert not root.status.is_ok
    assert (root.attributes or {})["error.type"] == "server_error"
    assert [event.name for event in root.events] == ["client_disconnected"]


def test_a_preemption_is_an_event_at_the_time_it_happened(
    tracer: RequestTracer, exporter: InMemorySpanExporter
) -> None:
    one = record()
    end = one.phases[-1].end_ns
    one.phases += [Phase("queue", end, end + 5), Phase("prefill", end + 5, end + 9)]
    tracer.finish(one)
    tracer.close()
    (root,) = [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
    (event,) = root.events
    assert event.name == "preempted"
    again = [s for s in exporter.get_finished_spans() if s.name == "queue"][1]
    assert event.timestamp == again.start_time


@pytest.mark.parametrize(
    ("num_matched", "num_disk", "kind"), [(0, 0, "none"), (32, 0, "device"), (32, 16, "disk")]
)
def test_what_a_match_found_and_where(
    tracer: RequestTracer,
    exporter: InMemorySpanExporter,
    num_matched: int,
    num_disk: int,
    kind: str,
) -> None:
    one = record()
    now = one.end_ns
    one.phases.insert(
        2, Phase("prefix_match", now - 8_000, now - 8_000, num_matched, num_disk_tokens=num_disk)
    )
    spans = built(tracer, exporter, one)
    match = spans["prefix_match"]
    assert (match.attributes or {})["headwater.match_kind"] == kind
    events = [(e.name, e.timestamp, e.attributes) for e in spans["chat tiny"].events]
    restored = ("restored", match.end_time, {"headwater.tokens": num_disk})
    assert events == ([restored] if num_disk else [])


def test_links_to_the_previous_response_the_donor_and_the_connection(
    tracer: RequestTracer, exporter: InMemorySpanExporter
) -> None:
    tracer.finish(record(response_id="one"))
    tracer.finish(record(response_id="two"))
    connection = f"00-{TRACE_ID}-{PARENT_ID}-01"
    last = record(
        response_id="three",
        previous_response_id="one",
        donor="two",
        connection_traceparent=connection,
    )
    tracer.finish(last)
    tracer.finish(record(previous_response_id="unknown"))
    tracer.close()
    spans = [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
    one, two, three, unlinked = spans
    assert not unlinked.links
    found = {str((k.attributes or {})["headwater.link"]): k.context for k in three.links}
    assert one.context is not None and two.context is not None
    assert found["previous_response"].span_id == one.context.span_id
    assert found["cache_donor"].span_id == two.context.span_id
    assert found["connection"].trace_id == int(TRACE_ID, 16)
    assert (three.attributes or {})["headwater.cache.donor_response.id"] == "two"


def test_several_choices_are_one_server_span(
    tracer: RequestTracer, exporter: InMemorySpanExporter
) -> None:
    usage = Usage(12, 4, 3)
    for choice in (2, 0, 1):
        tracer.finish(
            record(
                choice=choice,
                num_choices=3,
                num_per_prompt=3,
                group="g",
                usage=usage,
                finish_reason=FinishReason.LENGTH,
            )
        )
    tracer.close()
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    attributes = root.attributes or {}
    assert attributes["gen_ai.request.choice.count"] == 3
    assert attributes["gen_ai.usage.input_tokens"] == 12
    assert attributes["gen_ai.usage.output_tokens"] == 9
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert root.context is not None
    choices = {s.name: s for s in spans if s.parent and s.parent.span_id == root.context.span_id}
    assert set(choices) == {"choice 0", "choice 1", "choice 2"}
    for span in choices.values():
        assert span.context is not None
        inside = [s.name for s in spans if s.parent and s.parent.span_id == span.context.span_id]
        assert inside == ["tokenize", "queue", "prefill", "decode"]


def test_each_of_several_prompts_counts_once(
    tracer: RequestTracer, exporter: InMemorySpanExporter
) -> None:
    several = {"num_choices": 4, "num_per_prompt": 2, "group": "g"}
    for choice, usage in enumerate((Usage(12, 4, 3), Usage(12, 11, 3), Usage(7, 0, 2), None)):
        tracer.finish(record(choice=choice, usage=usage, **several))
    tracer.close()
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    attributes = root.attributes or {}
    assert attributes["gen_ai.usage.input_tokens"] == 12 + 7
    assert attributes["gen_ai.usage.output_tokens"] == 3 + 3 + 2
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 4


@pytest.mark.anyio
async def test_records_beyond_the_bound_are_dropped_and_told_of(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_PENDING_RECORDS", 1)
    begun, go_on = threading.Event(), threading.Event()
    build = RequestTracer._build

    def wait(self: RequestTracer, choices: list[RequestRecord]) -> None:
        begun.set()
        assert go_on.wait(30)
        build(self, choices)

    monkeypatch.setattr(RequestTracer, "_build", wait)
    tracer = RequestTracer(exporter)
    engine = await start_thread_engine(lambda: ScriptedCore(in_order([]), info=INFO))
    try:
        metrics = build_services(Settings(), engine, byte_assets(), tracer).metrics
        tracer.finish(record())
        assert begun.wait(30)
        for _ in range(3):
            tracer.finish(record())
        (told,) = [each for each in await metrics.collect() if each.metric is DROPPED]
        assert told.value == 2
    finally:
        go_on.set()
        tracer.close()
        await engine.close()
    assert len([s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]) == 2


def test_phases_follow_one_another_to_the_end() -> None:
    now = time.monotonic_ns()
    one = RequestRecord(operation="chat", model="tiny", start_ns=now - 1_000_000)
    one.stamp("receive")
    one.stamp("prepare")
    sent = one.phases[-1].end_ns
    one.take_engine_phases(
        (
            Phase("queue", sent + 100, sent + 200),
            Phase("prefill", sent + 200, sent + 300, 4),
            Phase("decode", sent + 300, sent + 900, 3),
        )
    )
    one.close(sent + 1000)
    names = ["receive", "prepare", "dispatch", "queue", "prefill", "decode", "stream"]
    assert [phase.name for phase in one.phases] == names
    assert one.phases[0].start_ns == one.start_ns
    assert one.phases[-1].end_ns == one.end_ns
    for before, after in pairwise(one.phases):
        assert before.end_ns == after.start_ns


def test_nothing_is_kept_on_content(tracer: RequestTracer, exporter: InMemorySpanExporter) -> None:
    root = built(tracer, exporter, record())["chat tiny"]
    assert not [name for name in root.attributes or {} if re.search("messages|instructions", name)]

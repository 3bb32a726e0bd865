"""Spans and metrics of every kind of request, received over real OTLP."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from tests.e2e.conftest import free_port, serve
from tests.e2e.tracing_client import PARENT, TRACES, ask_everything

SERVED = {"receive", "tokenize", "prepare", "queue", "prefix_match", "prefill", "decode", "stream"}


@dataclass(frozen=True, slots=True)
class Received:
    """What reached the collector until the server had ended."""

    spans: list[Span]
    metrics: dict[str, Metric]

    def trace(self, name: str) -> tuple[Span, list[Span]]:
        """The root of a request's trace, and the spans right below it."""
        mine = [span for span in self.spans if span.trace_id.hex() == TRACES[name]]
        (root,) = [span for span in mine if span.kind == Span.SPAN_KIND_SERVER]
        below = [span for span in mine if span.parent_span_id == root.span_id]
        return root, sorted(below, key=lambda span: span.start_time_unix_nano)


def ask(port: int) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_RESOURCE_ATTRIBUTES": "openinference.project.name=e2e",
    }
    with serve("--kv-memory", "256MiB", environment=environment) as server:
        ask_everything(server)


async def collect() -> Received:
    port = free_port()
    spans: list[Span] = []
    metrics: dict[str, Metric] = {}
    told = asyncio.Event()
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    async with OtelTapHttpProtobufReceiver(settings) as receiver:

        async def read_metrics() -> None:
            async for metric in receiver.stream_metrics():
                metrics[metric.name] = metric
                if metric.name == "vllm:request_success":
                    told.set()

        reading = asyncio.create_task(read_metrics())
        asking = asyncio.create_task(asyncio.to_thread(ask, port))
        async for span in receiver.stream_traces():
            spans.append(span)
            if sum(span.kind == Span.SPAN_KIND_SERVER for span in spans) == len(TRACES):
                break
        await asking
        await asyncio.wait_for(told.wait(), 10)
        reading.cancel()
    return Received(spans, metrics)


@pytest.fixture(scope="module")
def received() -> Received:
    return asyncio.run(collect())


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Values by name."""
    found: dict[str, Any] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind == "array_value":
            found[pair.key] = [one.string_value for one in pair.value.array_value.values]
        elif kind:
            found[pair.key] = getattr(pair.value, kind)
    return found


def test_a_span_arrives_once(received: Received) -> None:
    ids = [(span.trace_id, span.span_id) for span in received.spans]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", TRACES)
def test_every_request_continues_its_callers_trace(received: Received, name: str) -> None:
    root, _ = received.trace(name)
    assert root.parent_span_id.hex() == PARENT
    about = attributes(root.attributes)
    assert about["gen_ai.provider.name"] == "headwater"
    assert about["server.address"] == "127.0.0.1"
    assert about["server.port"] > 0


@pytest.mark.parametrize("name", [name for name in TRACES if name != "choices"])
def test_phases_are_disjoint_and_cover_the_span(received: Received, name: str) -> None:
    root, phases = received.trace(name)
    wall = root.end_time_unix_nano - root.start_time_unix_nano
    covered = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in phases)
    for before, after in pairwise(phases):
        assert before.end_time_unix_nano <= after.start_time_unix_nano
    assert root.start_time_unix_nano <= phases[0].start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert 0.99 * wall <= covered <= wall
    assert not any(key.startswith("gen_ai.") for s in phases for key in attributes(s.attributes))


@pytest.mark.parametrize("name", ["chat", "responses", "first", "fork", "messages"])
def test_a_served_request_tells_its_phases_and_usage(received: Received, name: str) -> None:
    root, phases = received.trace(name)
    assert {span.name for span in phases} >= SERVED
    about = attributes(root.attributes)
    assert 1 <= about["gen_ai.usage.output_tokens"] <= 8
    written = about["gen_ai.usage.cache_write.input_tokens"]
    assert written == about["gen_ai.usage.cache_creation.input_tokens"]
    read = about["gen_ai.usage.cache_read.input_tokens"]
    assert read + written == about["gen_ai.usage.input_tokens"]
    assert [event.name for event in root.events] == ["first_token"]
    prefilled = [attributes(s.attributes) for s in phases if s.name == "prefill"]
    assert sum(each["headwater.tokens"] for each in prefilled) in (written, written + 1)
    assert ("lane" in {span.name for span in phases}) == (name in ("responses", "first", "fork"))


def test_options_are_told_as_they_were_asked_for(received: Received) -> None:
    about = attributes(received.trace("chat")[0].attributes)
    assert about["gen_ai.request.stop_sequences"] == ["zzz"]
    assert about["gen_ai.request.max_tokens"] == 8
    assert "gen_ai.request.seed" not in about
    assert not [key for key in about if "messages" in key or "instructions" in key]


def test_a_fork_links_to_what_it_continues_and_to_whose_pages_it_took(received: Received) -> None:
    first, _ = received.trace("first")
    fork, _ = received.trace("fork")
    links = {attributes(link.attributes)["headwater.link"]: link for link in fork.links}
    assert set(links) == {"previous_response", "cache_donor", "connection"}
    assert links["previous_response"].span_id == first.span_id
    assert links["cache_donor"].span_id == first.span_id
    assert links["connection"].trace_id.hex() == TRACES["chat"]
    about = attributes(fork.attributes)
    id_of_first = attributes(first.attributes)["gen_ai.response.id"]
    assert about["gen_ai.request.previous_response.id"] == id_of_first
    assert about["headwater.cache.donor_response.id"] == id_of_first


def test_a_cut_request_says_when_its_client_left(received: Received) -> None:
    root, _ = received.trace("cut")
    assert [event.name for event in root.events] == ["first_token", "client_disconnected"]
    assert attributes(root.attributes)["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize(("name", "error"), [("failed", "deadline"), ("refused", "invalid_value")])
def test_what_fails_or_is_refused_says_why(received: Received, name: str, error: str) -> None:
    root, _ = received.trace(name)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root.attributes)["error.type"] == error


def test_choices_are_one_span_of_two(received: Received) -> None:
    root, choices = received.trace("choices")
    assert [span.name for span in choices] == ["choice 0", "choice 1"]
    assert attributes(root.attributes)["gen_ai.request.choice.count"] == 2


def test_metrics_arrive_over_otlp_too(received: Received) -> None:
    durations = received.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert sum(point.count for point in durations) == len(TRACES) + 1  # a choice is a generation
    assert not any(point.HasField("min") or point.HasField("max") for point in durations)
    bounds = list(durations[0].explicit_bounds)
    assert bounds[:3] == [0.01, 0.02, 0.04] and bounds[-1] == 81.92
    ended = received.metrics["vllm:request_success"].sum
    assert ended.is_monotonic
    by_reason: dict[str, float] = {}
    for point in ended.data_points:
        reason = attributes(point.attributes)["finished_reason"]
        by_reason[reason] = point.as_double or point.as_int
    assert by_reason["abort"] == by_reason["deadline"] == 1
    assert sum(by_reason.values()) == len(TRACES)

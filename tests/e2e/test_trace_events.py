"""Events that need a crowded engine, received over real OTLP: a preemption, and what disk gave
back."""

import asyncio
import threading
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from tests.e2e.conftest import Server, free_port, serve
from tests.e2e.test_traces import attributes

PARENT = "b7ad6b7169203331"
LONG = 420
"""Tokens of an answer: two of them have no room side by side."""


def ask(server: Server, number: int, text: str, max_tokens: int) -> None:
    """In the trace of that number."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    headers = {"traceparent": f"00-{number:032x}-{PARENT}-01"}
    server.http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()


def crowd(port: int) -> None:
    """Traces 1 and 2 have to give way to each other; 4 asks again what 3 asked, which 1 and 2
    drove out to disk."""
    environment = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{port}/v1/traces"}
    pebbles = " ".join(f"{number} pebbles." for number in range(40))
    # As quick as each other: neither has ended when the pages run out.
    options = ("--kv-memory", "16MiB", "--cache-disk", "64MiB", "--speculation", "off")
    with serve(*options, environment=environment) as server:
        ask(server, 3, pebbles, 1)
        both = [
            threading.Thread(target=ask, args=(server, number, f"Story {number}.", LONG))
            for number in (1, 2)
        ]
        for each in both:
            each.start()
        for each in both:
            each.join()
        ask(server, 4, pebbles, 1)


async def collect() -> dict[int, tuple[Span, list[Span]]]:
    """Each trace's root, and all spans of it."""
    port = free_port()
    spans: list[Span] = []
    settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
    async with OtelTapHttpProtobufReceiver(settings) as receiver:
        asking = asyncio.create_task(asyncio.to_thread(crowd, port))
        async for span in receiver.stream_traces():
            spans.append(span)
            if sum(each.kind == Span.SPAN_KIND_SERVER for each in spans) == 4:
                break
        await asking
    traces: dict[int, tuple[Span, list[Span]]] = {}
    for root in (each for each in spans if each.kind == Span.SPAN_KIND_SERVER):
        below = [each for each in spans if each.parent_span_id == root.span_id]
        below.sort(key=lambda each: each.start_time_unix_nano)
        traces[int(root.trace_id.hex(), 16)] = root, below
    return traces


def names(events: Any) -> list[str]:
    return [event.name for event in events]


def test_a_preemption_and_a_restore_are_events_and_leave_no_gap() -> None:
    traces = asyncio.run(collect())
    assert set(traces) == {1, 2, 3, 4}
    (gave_way,) = [n for n in (1, 2) if "preempted" in names(traces[n][0].events)]
    root, phases = traces[gave_way]
    again = [phase for phase in phases if phase.name == "queue"][1:]
    told = [event for event in root.events if event.name == "preempted"]
    assert [e.time_unix_nano for e in told] == [p.start_time_unix_nano for p in again]
    assert attributes(root.attributes)["headwater.preemptions"] == len(told)

    root, phases = traces[4]
    (restored,) = [event for event in root.events if event.name == "restored"]
    (match,) = [phase for phase in phases if phase.name == "prefix_match"]
    assert attributes(match.attributes)["headwater.match_kind"] == "disk"
    assert restored.time_unix_nano == match.end_time_unix_nano
    num_restored = attributes(restored.attributes)["headwater.tokens"]
    about = attributes(root.attributes)
    assert 0 < num_restored == about["headwater.cache.disk_tokens"]
    assert num_restored <= about["gen_ai.usage.cache_read.input_tokens"]

    for root, phases in traces.values():
        wall = root.end_time_unix_nano - root.start_time_unix_nano
        covered = sum(p.end_time_unix_nano - p.start_time_unix_nano for p in phases)
        assert 0.99 * wall <= covered <= wall

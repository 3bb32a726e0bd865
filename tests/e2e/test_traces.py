"""Spans of an HTTP and a WebSocket request, received over OTLP with the caller's trace id."""

import asyncio
import json

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings
from websockets.sync.client import connect

from tests.e2e.conftest import free_port, serve

HTTP_TRACE = "11111111111111111111111111111111"
WS_TRACE = "22222222222222222222222222222222"
PARENT = "b7ad6b7169203331"
PHASES = {"tokenize", "queue", "prefix_match", "prefill", "decode"}


def ask_over_http_and_websocket(collector_port: int) -> None:
    """One request each way, on a server that exports and, at its end, flushes."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector_port}"}
    with serve("--kv-memory", "256MiB", environment=environment) as server:
        answer = server.http.post(
            "/v1/chat/completions",
            json={
                "model": "default",
                "messages": [{"role": "user", "content": "Say hello."}],
                "max_tokens": 8,
            },
            headers={"traceparent": f"00-{HTTP_TRACE}-{PARENT}-03"},
        )
        assert answer.status_code == 200
        url = server.url.replace("http", "ws") + "/v1/responses"
        with connect(url, additional_headers={}) as socket:
            request = {
                "type": "response.create",
                "model": "default",
                "input": "Say hello.",
                "max_output_tokens": 8,
                "metadata": {"traceparent": f"00-{WS_TRACE}-{PARENT}-01"},
            }
            socket.send(json.dumps(request))
            kind = ""
            while kind not in ("response.completed", "response.incomplete"):
                kind = json.loads(socket.recv())["type"]


async def collect() -> list[Span]:
    """All spans that reached the receiver until the server had ended."""
    port = free_port()
    spans: list[Span] = []
    async with OtelTapHttpProtobufReceiver(
        OtelTapHttpProtobufReceiverSettings(http_port=port)
    ) as receiver:
        asking = asyncio.create_task(asyncio.to_thread(ask_over_http_and_websocket, port))
        async for span in receiver.stream_traces():
            spans.append(span)
            if sum(span.kind == Span.SPAN_KIND_SERVER for span in spans) == 2:
                break
        await asking
    return spans


def test_both_requests_arrive_with_the_callers_trace_and_their_phases() -> None:
    spans = asyncio.run(collect())
    for trace in (HTTP_TRACE, WS_TRACE):
        mine = [span for span in spans if span.trace_id.hex() == trace]
        (root,) = [span for span in mine if span.kind == Span.SPAN_KIND_SERVER]
        children = [span for span in mine if span is not root]
        assert root.parent_span_id.hex() == PARENT
        assert {span.parent_span_id for span in children} == {root.span_id}
        assert {span.name for span in children} >= PHASES
        covered = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in children)
        wall = root.end_time_unix_nano - root.start_time_unix_nano
        assert 0.9 * wall <= covered <= wall

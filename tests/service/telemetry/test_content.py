"""What was said is in a trace only where the standard variable asks for it."""

import json
import re

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from engine.scripted import text_script
from engine.types import FinishReason
from service.config import Settings
from service.conversation import Conversation, Message, ToolCall
from service.events import (
    Content,
    ReasoningDelta,
    RequestRecord,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from service.telemetry.settings import read_telemetry
from service.telemetry.tracing import RequestTracer
from tests.service.calls import ask
from tests.service.conftest import run_server

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def traced(*records: RequestRecord) -> dict[str, str]:
    """The attributes of the request's span, as text."""
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter)
    for record in records:
        tracer.finish(record)
    tracer.close()
    (root,) = [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
    return {name: str(value) for name, value in (root.attributes or {}).items()}


@pytest.mark.parametrize("value", [None, "", "false", "1", "span"])
def test_off_by_default(value: str | None) -> None:
    environment = ENDPOINT if value is None else {**ENDPOINT, VARIABLE: value}
    telemetry = read_telemetry(environment)
    assert not telemetry.captures_content
    with run_server(text_script("abc"), settings=Settings(telemetry=telemetry)) as server:
        ask(server)
        (record,) = server.ended()
    assert record.content is None
    told = traced(record)
    assert not [name for name in told if re.search("messages|instructions", name)]
    assert "abc" not in told.values()


def test_without_traces_nothing_is_kept() -> None:
    assert not read_telemetry({VARIABLE: "true"}).captures_content


@pytest.mark.parametrize("value", ["true", "True"])
def test_asked_for_it_is_in_the_trace(value: str) -> None:
    telemetry = read_telemetry({**ENDPOINT, VARIABLE: value})
    with run_server(text_script("abc"), settings=Settings(telemetry=telemetry)) as server:
        ask(server, n=2, messages=[{"role": "user", "content": "Say abc."}])
        told = traced(*server.ended(2))
    said = [{"role": "user", "parts": [{"type": "text", "content": "Say abc."}]}]
    assert json.loads(told["gen_ai.input.messages"]) == said
    answers = json.loads(told["gen_ai.output.messages"])
    assert [answer["parts"] for answer in answers] == [[{"type": "text", "content": "abc"}]] * 2
    assert answers[0]["finish_reason"] in ("stop", "length")


def test_tools_and_thoughts() -> None:
    call = {"type": "tool_call", "id": "c1", "name": "tide", "arguments": '{"at":"6"}'}
    content = Content(
        Conversation(
            (
                Message("assistant", "Let me see.", tool_calls=(ToolCall("c1", "tide", "{}"),)),
                Message("tool", "high", tool_call_id="c1"),
            )
        ),
        [
            ReasoningDelta("so "),
            ReasoningDelta("what"),
            TextDelta("It "),
            TextDelta("is"),
            ToolCallStarted(0, "c1", "tide"),
            ToolCallDelta(0, '{"at":'),
            ToolCallDelta(0, '"6"}'),
        ],
    )
    record = RequestRecord("chat", "tiny", 1, 2, content=content, usage=Usage(1, 0, 1))
    record.finish_reason = FinishReason.STOP
    told = traced(record)
    before, response = json.loads(told["gen_ai.input.messages"])
    assert before["parts"] == [
        {"type": "text", "content": "Let me see."},
        call | {"arguments": "{}"},
    ]
    answered = {"type": "tool_call_response", "id": "c1", "response": "high"}
    assert response == {"role": "tool", "parts": [answered]}
    (answer,) = json.loads(told["gen_ai.output.messages"])
    assert answer == {
        "role": "assistant",
        "finish_reason": "stop",
        "parts": [
            {"type": "reasoning", "content": "so what"},
            {"type": "text", "content": "It is"},
            call,
        ],
    }

"""The Open Responses conformance cases (openresponses.org), each body and event checked by the
pydantic types of the specification."""

import json
from typing import Any

import openresponses_types as spec
import pytest

from tests.service.conftest import MODEL, LiveServer

EVENTS: dict[str, Any] = {
    str(next(iter(kind.model_fields["type"].annotation))): kind
    for name, kind in vars(spec).items()
    if name.endswith("StreamingEvent")
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CASES: dict[str, dict[str, Any]] = {
    "basic": {"input": "Say hello in exactly 3 words."},
    "message item": {"input": [{"type": "message", "role": "user", "content": "Say hello."}]},
    "system prompt": {
        "input": [
            {"type": "message", "role": "system", "content": "You are a pirate. Stay so."},
            {"type": "message", "role": "user", "content": "Say hello."},
        ]
    },
    "instructions": {"instructions": "You are a pirate.", "input": "Say hello."},
    "tool calling": {"input": "weather in Paris?", "tools": [WEATHER]},
    "two tool calls": {"input": "weather in Paris and Rome?", "tools": [WEATHER]},
    "tool result": {
        "tools": [WEATHER],
        "input": [
            {"type": "message", "role": "user", "content": "weather in Paris?"},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city": "Paris"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny in Paris"},
        ],
    },
    "multi-turn": {
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello Alice.", "annotations": []}],
            },
            {"type": "message", "role": "user", "content": "What is my name?"},
        ]
    },
    "structured": {
        "input": "A place as JSON",
        "text": {
            "format": {
                "type": "json_schema",
                "name": "place",
                "schema": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
                    "required": ["city", "degrees"],
                    "additionalProperties": False,
                },
            }
        },
    },
    "sampling": {
        "input": "hi",
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "metadata": {"k": "v"},
        "max_tool_calls": 3,
        "safety_identifier": "someone",
    },
    "cut short": {"input": "hi", "max_output_tokens": 16},
}


def body_of(case: str) -> dict[str, Any]:
    body = {"model": MODEL, **CASES[case]}
    spec.CreateResponseBody.model_validate(body)
    return body


def by_the_types(response: dict[str, Any]) -> dict[str, Any]:
    """The response without the schema of its format, for which the types allow only null."""
    text = response["text"]
    if "schema" not in text["format"]:
        return response
    return {**response, "text": {**text, "format": {**text["format"], "schema": None}}}


def checked(response: dict[str, Any]) -> spec.ResponseResource:
    """The response by the specification's type; nothing that it requires may be left out."""
    return spec.ResponseResource.model_validate(by_the_types(response))


@pytest.mark.parametrize("case", CASES)
def test_a_whole_response(server: LiveServer, case: str) -> None:
    answer = server.http.post("/v1/responses", json=body_of(case))
    assert answer.status_code == 200, answer.text
    response = checked(answer.json())
    assert response.status in ("completed", "incomplete")
    assert response.output
    again = server.http.get(f"/v1/responses/{response.id}")
    assert checked(again.json()) == response


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_response(server: LiveServer, case: str) -> None:
    answer = server.http.post("/v1/responses", json={**body_of(case), "stream": True})
    assert answer.status_code == 200, answer.text
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    events = []
    for name, data in frames:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        told = {"response": by_the_types(event["response"])} if "response" in event else {}
        EVENTS[event["type"]].model_validate({**event, **told})
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    last = checked(events[-1]["response"])
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert last.usage is not None


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_file", "file_data": "AAAA", "filename": "a.pdf"},
    ],
)
def test_what_the_model_cannot_read_is_refused(server: LiveServer, part: dict[str, Any]) -> None:
    content = [{"type": "input_text", "text": "What is this?"}, part]
    body = {"model": MODEL, "input": [{"type": "message", "role": "user", "content": content}]}
    spec.CreateResponseBody.model_validate(body)
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("input[0].content[1]")


def test_the_result_of_the_tool_is_in_the_answer(server: LiveServer) -> None:
    answer = server.http.post("/v1/responses", json=body_of("tool result"))
    assert "sunny in Paris" in answer.json()["output"][0]["content"][0]["text"]
    calls = server.http.post("/v1/responses", json=body_of("two tool calls")).json()["output"]
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Paris", "Rome"]

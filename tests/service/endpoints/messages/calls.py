"""What these tests say in Anthropic's dialect, and how they read the answers."""

import json
from collections.abc import Iterable
from typing import Any

from tests.service.conftest import MODEL, LiveServer

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "hi"}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def body(**fields: Any) -> dict[str, Any]:
    """A body that is in order, with `fields` put over it."""
    return {"model": MODEL, "max_tokens": 100, "messages": [HELLO], **fields}


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """An unstreamed answer."""
    answer = server.http.post(MESSAGES, json=body(**fields))
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def count(server: LiveServer, **fields: Any) -> int:
    """What `count_tokens` says of the same prompt."""
    sent = body(**fields)
    del sent["max_tokens"]
    answer = server.http.post(COUNT, json=sent)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"input_tokens"}
    return int(answer.json()["input_tokens"])


def stream(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    answer = server.http.post(MESSAGES, json=body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event; each must be named as its type says."""
    events = []
    for frame in text.split("\n\n"):
        if frame:
            name, data = frame.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client has at the end of a stream; the order of events must be right."""
    start, *rest = [event for event in events if event["type"] != "ping"]
    *blocks, end, stop = rest
    assert (start["type"], end["type"]) == ("message_start", "message_delta")
    assert stop == {"type": "message_stop"}
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    running = False
    arguments = ""
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not running and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            running, arguments = True, ""
            continue
        assert running and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            running = False
            if block["type"] == "tool_use" and arguments:
                block["input"] = json.loads(arguments)
            continue
        assert event["type"] == "content_block_delta"
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                block["signature"] = text
            case {"type": "input_json_delta", "partial_json": text}:
                assert block["type"] == "tool_use"
                arguments += text
            case delta:
                raise AssertionError(delta)
    assert not running
    return {**message, **end["delta"], "usage": {**message["usage"], **end["usage"]}}


def text_of(message: dict[str, Any]) -> str:
    """The text of a message."""
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")

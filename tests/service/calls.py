"""What tests of the edge say to it, and how they read its answers."""

import json
from typing import Any

from tests.service.conftest import MODEL, LiveServer

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    """A chat body that is in order, with `fields` put over it."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """An unstreamed answer."""
    answer = server.http.post(CHAT, json=body(**fields))
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def content(answer: dict[str, Any]) -> str:
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def stream(server: LiveServer, **fields: Any) -> list[Any]:
    """The frames of a streamed answer, JSON decoded; the last must be [DONE]."""
    answer = server.http.post(CHAT, json=body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *frames, done = data_of(answer.text)
    assert done == "[DONE]"
    return [json.loads(frame) for frame in frames]


def data_of(text: str) -> list[str]:
    """The data of each frame of an event stream."""
    return [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame]


def joined(frames: list[Any]) -> str:
    """The text of streamed frames."""
    return "".join(
        choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"]
    )

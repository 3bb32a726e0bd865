"""Tool calls over HTTP on a scripted engine: streamed and unstreamed agree on all of it.

The kinds of vllm-project/vllm#53255, #49496, #17703 and Rapid-MLX#859.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.scripted.script import text_script
from engine.types import FinishReason
from service.config import Settings
from tests.service.calls import ask, stream
from tests.service.conftest import LiveServer

ARGUMENTS = '{"city":"Münster","note":"日本 😀"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def gathered(frames: list[Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Text, calls and finish reasons of a stream, joined as the SDK joins them."""
    text = ""
    calls: list[dict[str, Any]] = []
    reasons: list[str] = []
    for frame in frames:
        for choice in frame["choices"]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", ()):
                if piece["index"] == len(calls):
                    calls.append(piece)
                else:
                    assert piece.keys() == {"index", "function"}
                    last = calls[piece["index"]]["function"]
                    last["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    return text, calls, reasons


CHOICES: list[Any] = ["auto", "required", NAMED, ALLOWED, "none"]


@pytest.mark.parametrize(
    ("said", "finish", "reason"),
    [
        (f"Look: {CALL}", FinishReason.STOP, "tool_calls"),
        ("No, I will not.", FinishReason.STOP, "stop"),
        (CALL[:70], FinishReason.LENGTH, "length"),
        (CALL, FinishReason.LENGTH, "length"),
        (CALL[:70], FinishReason.STOP, "stop"),
    ],
)
def test_stream_and_whole_agree(
    live_server: Callable[..., LiveServer], said: str, finish: FinishReason, reason: str
) -> None:
    scripts = [text_script(said, size, finish=finish) for size in (1, 7, 1000)]
    server = live_server(*(script for script in scripts for _ in range(2)))
    for _ in scripts:
        for choice in CHOICES:
            _agree(server, choice, said, reason)


def _agree(server: LiveServer, tool_choice: Any, said: str, reason: str) -> None:
    whole = ask(server, tools=[TOOL], tool_choice=tool_choice)["choices"][0]
    text, calls, reasons = gathered(stream(server, tools=[TOOL], tool_choice=tool_choice))
    message = whole["message"]
    streamed = [call["function"] for call in calls]
    assert [call["function"] for call in message.get("tool_calls", [])] == streamed
    assert (message["content"] or "") == text
    assert reasons == [whole["finish_reason"]]
    if tool_choice == "none":
        assert (text, calls) == (said, [])
        return
    assert whole["finish_reason"] == reason
    if reason == "tool_calls":
        assert streamed == [{"name": "weather", "arguments": ARGUMENTS}]
        assert text == "Look:"


def test_two_calls_have_their_own_indices_and_ids(
    live_server: Callable[..., LiveServer],
) -> None:
    server = live_server(text_script(f"{CALL}\n{CALL}", 1000))
    text, calls, reasons = gathered(stream(server, tools=[TOOL]))
    assert (text, reasons) == ("", ["tool_calls"])
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS] * 2
    one = ask(server, tools=[TOOL], parallel_tool_calls=False)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    assert one["message"]["content"] is None


def test_the_format_can_be_set(live_server: Callable[..., LiveServer]) -> None:
    said = f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]'
    server = live_server(text_script(said), settings=Settings(tool_format="mistral"))
    [call] = ask(server, tools=[TOOL])["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert len(call["id"]) == 9


def test_responses_show_calls_as_items(live_server: Callable[..., LiveServer]) -> None:
    server = live_server(text_script(f"Look: {CALL}", 5))
    body = {"model": "scripted-model", "input": "hi", "tools": [FLAT]}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    message, call = answer.json()["output"]
    assert message["content"][0]["text"] == "Look:"
    assert (call["type"], call["status"], call["arguments"]) == (
        "function_call",
        "completed",
        ARGUMENTS,
    )
    assert json.loads(call["arguments"])["note"] == "日本 😀"

"""What is refused, in Anthropic's envelope and with the path of the field; the server goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.scripted import Script, text_script
from service.config import Settings
from tests.service.conftest import CONTEXT, MODEL, LiveServer, quick, run_server
from tests.service.endpoints.messages.calls import (
    CALL,
    COUNT,
    HELLO,
    MESSAGES,
    RESULT,
    WEATHER,
    ask,
    body,
    text_of,
)

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}}
TEXT = {"type": "text", "text": "x"}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"a": [DEEP]}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("still here")) as running:
        yield running


def envelope(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must be in its envelope."""
    parsed = answer.json()
    assert parsed.keys() == {"type", "error", "request_id"}
    assert parsed["type"] == "error"
    assert parsed["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = parsed["error"]
    assert error.keys() <= {"type", "message", "details"}
    return error


def refusal(server: LiveServer, raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The error of a refused call, after which the server must answer as ever."""
    data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    answer = server.http.post(MESSAGES, content=data)
    assert answer.status_code == 400, answer.text
    error = envelope(answer)
    assert error["type"] == "invalid_request_error"
    assert text_of(ask(server)) == "still here"
    return error


def turns(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def tool_turns(*results: Any, call: Any = CALL) -> dict[str, Any]:
    called = {"role": "assistant", "content": [call]}
    return {"messages": [HELLO, called, {"role": "user", "content": list(results)}]}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"model": "\xff"}', b'{"x": ' + b"[" * 40_000, b"[]", b"null", b"7"]
)
def test_what_is_no_json_object(server: LiveServer, raw: bytes) -> None:
    assert refusal(server, raw)["details"]["error_code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_what_is_missing_is_named(server: LiveServer, name: str) -> None:
    sent = body()
    del sent[name]
    error = refusal(server, sent)
    assert error["message"] == f"Missing required parameter: '{name}'."
    assert error["details"] == {"error_code": "missing_required_parameter"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [HELLO] * 10_001}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (turns(), "messages[0].content"),
        (turns(*[TEXT] * 1_001), "messages[0].content"),
        (turns(3), "messages[0].content[0]"),
        (turns({"text": "x"}), "messages[0].content[0].type"),
        (turns({"type": "text"}), "messages[0].content[0].text"),
        (turns({"type": "text", "text": 3}), "messages[0].content[0].text"),
        (turns(TEXT, IMAGE), "messages[0].content[1].type"),
        (turns(DOCUMENT), "messages[0].content[0].type"),
        (turns({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type"),
        (turns(CALL), "messages[0].content[0].type"),
        (turns(RESULT), "messages[0].content[0].tool_use_id"),
        (turns({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (tool_turns(RESULT, RESULT), "messages[2].content[1].tool_use_id"),
        (tool_turns({**RESULT, "content": [IMAGE]}), "messages[2].content[0].content[0].type"),
        (tool_turns({**RESULT, "content": 3}), "messages[2].content[0].content"),
        (tool_turns(TEXT), "messages[1].content[0]"),
        (tool_turns(RESULT, call={**CALL, "id": None}), "messages[1].content[0].id"),
        (tool_turns(RESULT, call={**CALL, "name": ""}), "messages[1].content[0].name"),
        (tool_turns(RESULT, call={**CALL, "input": "{}"}), "messages[1].content[0].input"),
        (tool_turns(RESULT, call={**CALL, "input": DEEP}), "messages[1].content[0].input"),
        ({"system": 3}, "system"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, {**WEATHER, "input_schema": []}]}, "tools[1].input_schema"),
        ({"tools": [{**WEATHER, "input_schema": DEEP}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "n" * 257}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "description": 3}]}, "tools[0].description"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        (
            {"output_config": {"format": {"type": "text", "schema": {}}}},
            "output_config.format.type",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}},
            "output_config.format.schema",
        ),
        ({"temperature": 1.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
        ({"thinking": {"type": "deeply"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"diagnostics": {"previous_message_id": 3}}, "diagnostics.previous_message_id"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "cache_control.ttl"),
        (
            turns(*[{**TEXT, **EPHEMERAL}] * 5),
            "messages[0].content[4].cache_control",
        ),
        (
            {
                "system": [{**TEXT, **EPHEMERAL}],
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            "cache_control.ttl",
        ),
    ],
)
def test_a_wrong_field_is_named(server: LiveServer, fields: dict[str, Any], path: str) -> None:
    error = refusal(server, body(**fields))
    assert f"'{path}'" in error["message"]
    assert error["details"]["error_code"] in (
        "invalid_type",
        "invalid_value",
        "missing_required_parameter",
    )


def test_a_thread_is_refused_with_the_code_that_clients_go_on_from(server: LiveServer) -> None:
    error = refusal(server, body(thread={"type": "create"}))
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_messages_that_say_nothing(server: LiveServer) -> None:
    billing = {"role": "system", "content": "x-anthropic-billing-header: x"}
    assert refusal(server, body(messages=[billing]))["message"] == "The messages say nothing."


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_a_prompt_over_the_context_is_called_too_long(server: LiveServer, path: str) -> None:
    """Agents shorten their history when they read these words."""
    sent = body(messages=[{"role": "user", "content": "x" * CONTEXT}])
    answer = server.http.post(path, json=sent)
    assert answer.status_code == 400
    error = envelope(answer)
    assert error["message"].startswith("prompt is too long: ")
    assert str(CONTEXT) in error["message"]
    assert error["details"] == {"error_code": "context_length_exceeded"}


def test_count_tokens_refuses_as_messages_does(server: LiveServer) -> None:
    answer = server.http.post(COUNT, json={"model": MODEL, **turns(IMAGE)})
    assert answer.status_code == 400
    assert "'messages[0].content[0].type'" in envelope(answer)["message"]
    assert server.http.post(COUNT, json={"model": MODEL, "messages": [HELLO]}).status_code == 200


def test_unknown_models_and_paths(server: LiveServer) -> None:
    answer = server.http.post(MESSAGES, json=body(model="claude-nine"))
    assert answer.status_code == 404
    assert envelope(answer)["type"] == "not_found_error"
    assert envelope(server.http.post(f"{MESSAGES}/batches"))["type"] == "not_found_error"
    wrong = server.http.get(MESSAGES)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert envelope(wrong)["type"] == "invalid_request_error"
    version = {"anthropic-version": "2026-10-21"}
    missing = server.http.get("/v1/models/claude-nine", headers=version)
    assert envelope(missing)["type"] == "not_found_error"
    assert "error" in server.http.get("/v1/models/claude-nine").json()


def test_a_host_that_is_not_ours(server: LiveServer) -> None:
    answer = server.http.post(MESSAGES, json=body(), headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert envelope(answer)["type"] == "permission_error"


def test_names_given_at_start_are_aliases() -> None:
    settings = Settings(model_names=("ours", "claude-haiku-4-5"))
    with run_server(text_script("x"), settings=settings) as server:
        assert ask(server, model="claude-haiku-4-5")["model"] == "ours"
        assert ask(server, model="default")["model"] == "ours"


def test_a_body_over_the_limit() -> None:
    with run_server(text_script("x"), settings=quick(body_bytes=1000)) as server:
        answer = server.http.post(MESSAGES, content=b"x" * 1001)
        assert answer.status_code == 413
        assert envelope(answer)["type"] == "request_too_large"
        assert text_of(ask(server)) == "x"


def test_a_full_queue_is_overload() -> None:
    with (
        run_server(Script(finish=None), max_open=1) as server,
        server.http.stream("POST", MESSAGES, json=body(stream=True)) as running,
    ):
        assert "message_start" in next(running.iter_text())
        answer = server.http.post(MESSAGES, json=body())
        assert answer.status_code == 529
        assert envelope(answer)["type"] == "overloaded_error"
        assert answer.headers["retry-after-ms"] == "1000"

"""What is refused, with status, code and the path of the field; the server goes on."""

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from engine.scripted import text_script
from tests.service.calls import CHAT, ask, body, content
from tests.service.conftest import CONTEXT, MODEL, VOCAB, LiveServer, quick, run_server
from tests.service.raw import connected, read_until

USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
TOOL = {"type": "function", "function": {"name": "f"}}
LONG_NAMED = {"type": "function", "function": {"name": "n" * 2**20}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NUM_TEMPLATE_TOKENS = len("<user\n><assistant\n") + 1


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("still here")) as running:
        yield running


def refusal(server: LiveServer, raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The error object of a refused call, after which the server must answer as ever."""
    data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    answer = server.http.post(CHAT, content=data)
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert content(ask(server)) == "still here"
    return {"status": answer.status_code, **error}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "m",}',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"x": ' + b"[" * 40_000,
        b'{"x": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
    ],
)
def test_malformed_json(server: LiveServer, raw: bytes) -> None:
    error = refusal(server, raw)
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_json", None)


def test_a_body_of_too_many_values(server: LiveServer) -> None:
    for raw in (b'{"x": ' + b"[" * 100_000, b'{"a": "", "x" : ["", ' + b"{}," * 100_000 + b"1]}"):
        error = refusal(server, raw)
        assert (error["status"], error["code"], error["param"]) == (400, "invalid_value", "x")
        assert "50000" in error["message"]


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"text"', b"7"])
def test_a_body_that_is_no_object(server: LiveServer, raw: bytes) -> None:
    error = refusal(server, raw)
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_type", None)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({"messages": [USER]}, "model"),
        ({"model": MODEL}, "messages"),
        ({"model": MODEL, "messages": None}, "messages"),
        (body(messages=[{"content": "x"}]), "messages[0].role"),
        (body(messages=[USER, {"role": "user"}]), "messages[1].content"),
        (body(messages=[{"role": "system", "content": None}]), "messages[0].content"),
        (body(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (body(messages=[{"role": "function", "content": "x"}]), "messages[0].name"),
        (
            body(messages=[{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
        ),
        (
            body(messages=[{"role": "assistant", "tool_calls": [{"id": "c"}]}]),
            "messages[0].tool_calls[0].function",
        ),
        (
            body(prediction={"type": "content", "content": [{"type": "text", "text": None}]}),
            "prediction.content[0].text",
        ),
        (body(tools=[{"type": "function"}]), "tools[0].function"),
    ],
)
def test_what_is_missing_is_named(server: LiveServer, raw: dict[str, Any], param: str) -> None:
    error = refusal(server, raw)
    assert (error["status"], error["code"]) == (400, "missing_required_parameter")
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role"),
        ({"model": 7}, "model"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"seed": "soon"}, "seed"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[...]"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": 3}, "cache_salt"),
    ],
)
def test_wrong_types_are_named(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = refusal(server, body(**fields))
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_type", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [USER] * 100_000}, "messages"),
        ({"model": ""}, "model"),
        ({"model": "m" * 10_000}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "x" * 257]}, "stop[1]"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [0, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [0] * 65}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"tools": [TOOL] * 10_000}, "tools"),
        ({"tools": [LONG_NAMED]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 10_000}, "best_of"),
        ({"n": 17}, "n"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [0, VOCAB]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [0] * 1025}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"service_tier": "gold"}, "service_tier"),
    ],
)
def test_values_out_of_range_are_named(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    error = refusal(server, body(**fields))
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"lora_path": "x"}, "lora_path"),
        ({"echo": True}, "echo"),
        ({"chat_template": "x"}, "chat_template"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"whitespace": "x"}}, "structured_outputs.whitespace"),
    ],
)
def test_what_is_not_supported_yet_is_said_so(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    error = refusal(server, body(**fields))
    assert (error["status"], error["code"], error["param"]) == (400, "unsupported_value", param)


@pytest.mark.parametrize("key", ["-1", str(VOCAB), str(2**31), str(10**40), "abc", "", "²", "1.0"])
def test_a_bias_for_no_token_is_refused(server: LiveServer, key: str) -> None:
    error = refusal(server, body(logit_bias={key: 0}))
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_value", "logit_bias")


@pytest.mark.parametrize("where", ["tools", "chat_template_kwargs"])
def test_free_form_json_has_a_depth(server: LiveServer, where: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": [deep]}
    value: Any = [{**TOOL, "x": deep}] if where == "tools" else deep
    error = refusal(server, body(**{where: value}))
    assert error["status"] == 400
    assert error["param"].startswith(where)


def test_an_unknown_model(server: LiveServer) -> None:
    error = refusal(server, body(model="gpt-9"))
    assert (error["status"], error["code"]) == (404, "model_not_found")
    assert MODEL in error["message"]


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_edge_of_the_context(server: LiveServer, over: int) -> None:
    """One token of the context must be left for the answer."""
    text = "x" * (CONTEXT - NUM_TEMPLATE_TOKENS + over)
    if over < 0:
        messages = [{"role": "user", "content": text}]
        answer = ask(server, messages=messages)
        assert answer["usage"]["prompt_tokens"] == CONTEXT - 1
        assert answer["choices"][0]["finish_reason"] == "length"
        return
    error = refusal(server, body(messages=[{"role": "user", "content": text}]))
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
    assert str(CONTEXT) in error["message"] and str(CONTEXT + over) in error["message"]


@pytest.mark.parametrize("over", [0, 1, 10**6])
def test_prompt_and_max_tokens_together(server: LiveServer, over: int) -> None:
    num_prompt = ask(server)["usage"]["prompt_tokens"]
    fields = body(max_tokens=CONTEXT - num_prompt + over)
    if not over:
        assert content(ask(server, **fields)) == "still here"
        return
    error = refusal(server, fields)
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "max_tokens"
    assert str(CONTEXT) in error["message"] and str(CONTEXT + over) in error["message"]


@pytest.mark.parametrize("text", ["", "<|im_end|>", "<|im_start|>" * 50, "\x00"])
def test_odd_prompts_are_prompts(server: LiveServer, text: str) -> None:
    assert content(ask(server, messages=[{"role": "user", "content": text}])) == "still here"


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {10**12}\r\n\r\n"
    with run_server(text_script("x"), settings=quick(body_bytes=1000)) as server:
        with connected(server) as sock:
            sock.sendall(head.encode())
            assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 413")
        assert server.http.post(CHAT, content=b"x" * 1001).status_code == 413
        assert content(ask(server)) == "x"


def test_a_body_of_unknown_length_is_refused_where_it_passes_the_limit() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    with run_server(text_script("x"), settings=quick(body_bytes=1000)) as server:
        answer = server.http.post(CHAT, content=pieces())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


def test_what_is_not_http_is_answered_and_closed(server: LiveServer) -> None:
    with connected(server) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00" * 10)
        assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 400")
    with connected(server) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert content(ask(server)) == "still here"


@pytest.mark.parametrize(
    ("path", "fields", "param", "allowed"),
    [
        (
            CHAT,
            {"messages": [{**USER, "role": "robot"}]},
            "messages[0].role",
            "assistant, developer",
        ),
        (CHAT, {"service_tier": "x"}, "service_tier", "auto, default, fast"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "text, json_object"),
        (CHAT, {"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ("/v1/messages", {"messages": [{**USER, "role": "x"}]}, "messages[0].role", "system, user"),
        (
            "/v1/messages",
            {"messages": [USER], "cache_control": {"type": "ephemeral", "ttl": "2h"}},
            "cache_control.ttl",
            "1h, 5m",
        ),
        ("/v1/responses", {"input": [{**USER, "role": "x"}]}, "input[0].role", "assistant, dev"),
        ("/v1/responses", {"input": "x", "truncation": "x"}, "truncation", "auto, disabled"),
    ],
)
def test_the_values_that_are_allowed_are_said(
    server: LiveServer, path: str, fields: dict[str, Any], param: str, allowed: str
) -> None:
    base = body() if path == CHAT else {"model": MODEL}
    base |= {"max_tokens": 9} if path == "/v1/messages" else {}
    answer = server.http.post(path, json={**base, **fields})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"'{param}'" in message
    assert allowed in message


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/tokenize"])
def test_a_compressed_body_is_415(server: LiveServer, path: str) -> None:
    data = gzip.compress(json.dumps(body()).encode())
    answer = server.http.post(path, content=data, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "content-encoding 'gzip'" in answer.json()["error"]["message"]
    plain = {"content-encoding": "identity"}
    assert server.http.post(CHAT, json=body(), headers=plain).status_code == 200

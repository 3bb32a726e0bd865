"""Answers of a live server: streamed and whole ones agree, to the letter of the protocol."""

from typing import Any

import pytest

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason
from tests.service import calls as chat
from tests.service.conftest import CONTEXT, LiveServer, quick, run_server
from tests.service.endpoints.messages.calls import (
    CALL,
    HELLO,
    MESSAGES,
    RESULT,
    WEATHER,
    ask,
    body,
    count,
    events_of,
    joined,
    stream,
    text_of,
)
from tests.service.endpoints.stage import Stage

TEXT = "naïve 😸\u2028日本語"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_streamed_pieces_joined_are_the_whole_answer(
    stage: Stage, server: LiveServer, size: int
) -> None:
    stage.script = text_script(TEXT, size)
    whole = ask(server)
    streamed = joined(stream(server))
    assert whole["id"].startswith("msg_") and streamed["id"].startswith("msg_")
    assert whole["id"] != streamed["id"]
    assert {**streamed, "id": ""} == {**whole, "id": ""}
    assert whole["content"] == [{"type": "text", "text": TEXT}]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "end_turn",
    )


def test_a_stop_sequence_is_named_and_not_shown(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("ABCDEFGHIJ", 3)
    for message in (
        ask(server, stop_sequences=["FGH", "zzz"]),
        joined(stream(server, stop_sequences=["FGH", "zzz"])),
    ):
        assert text_of(message) == "ABCDE"
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "FGH")


def test_max_tokens_ends_an_answer(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("abcdef", repeat=True)
    message = ask(server, max_tokens=3)
    assert (text_of(message), message["stop_reason"]) == ("abc", "max_tokens")
    assert message["usage"]["output_tokens"] == 3


def test_more_than_the_context_has_left_is_cut_to_it(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x", repeat=True)
    message = ask(server, max_tokens=10**6)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == CONTEXT


def test_no_tokens_compute_the_prompt(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    message = ask(server, max_tokens=0)
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    assert stage.requests[-1].sampling.max_tokens == 0


def test_the_prompt_is_the_one_of_chat_completions(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    ask(server, system=[{"type": "text", "text": "Be kind.", **EPHEMERAL}], tools=[WEATHER])
    function = {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "parameters": WEATHER["input_schema"],
    }
    system = {"role": "system", "content": "Be kind."}
    tools = [{"type": "function", "function": function}]
    chat.ask(server, messages=[system, HELLO], tools=tools)
    ours, theirs = stage.requests[-2:]
    assert ours.token_ids == theirs.token_ids


def test_options_reach_the_engine(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    ask(server, temperature=0.5, top_p=0.25, top_k=7, stop_sequences=["é"], max_tokens=9)
    sampling = stage.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.stop, sampling.max_tokens) == (("é".encode(),), 9)
    ask(server)
    assert stage.requests[-1].sampling.temperature == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind.", "tools": [WEATHER]},
        {"system": [{"type": "text", "text": "Be kind.", **EPHEMERAL}]},
        {"tools": [{**WEATHER, **EPHEMERAL}]},
        {"messages": [HELLO, {"role": "assistant", "content": "The answer is ("}]},
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{**RESULT, **EPHEMERAL}]},
            ],
            "tools": [WEATHER],
        },
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, **EPHEMERAL},
    ],
)
def test_count_tokens_is_the_sum_of_the_usage(
    stage: Stage, server: LiveServer, fields: dict[str, Any]
) -> None:
    stage.script = Script(text_script("abc").steps, num_cached_tokens=5)
    usage = ask(server, **fields)["usage"]
    assert usage == joined(stream(server, **fields))["usage"]
    assert usage["cache_read_input_tokens"] == 5
    total = sum(value for name, value in usage.items() if name.endswith("input_tokens"))
    assert total == count(server, **fields)


def test_what_is_written_ends_at_the_last_breakpoint(stage: Stage, server: LiveServer) -> None:
    stage.script = Script(text_script("abc").steps, num_cached_tokens=5)
    system = [{"type": "text", "text": "Be kind.", **EPHEMERAL}]
    usage = ask(server, system=system)["usage"]
    kept = len("<system\nBe kind.>\n<")  # each special token is one, and the next one is the same
    assert usage["cache_creation_input_tokens"] == kept - 5
    assert usage["input_tokens"] == len("user\nhi>\n<assistant\n")
    everything = ask(server, system=system, **EPHEMERAL)["usage"]
    assert everything["input_tokens"] == 0
    nothing = ask(server, system="Be kind.")["usage"]
    assert nothing["cache_creation_input_tokens"] == 0


def test_a_silent_stream_is_pinged() -> None:
    script = Script((ScriptStep((97,), delay_s=0.5),))
    with run_server(script, settings=quick(keep_alive_s=0.05)) as server:
        events = stream(server)
    assert events[0]["type"] == "message_start"
    assert {"type": "ping"} in events
    assert text_of(joined(events)) == "a"


@pytest.mark.parametrize(
    ("script", "status", "kind"),
    [
        (Script((ScriptStep(error="the page pool is on fire"),)), 500, "api_error"),
        (Script(finish=FinishReason.ABORT), 529, "overloaded_error"),
        (Script(finish=FinishReason.DEADLINE), 504, "timeout_error"),
    ],
)
def test_what_fails_is_an_error_streamed_or_not(
    stage: Stage, server: LiveServer, script: Script, status: int, kind: str
) -> None:
    stage.script = Script((ScriptStep((97,)), *script.steps), script.finish)
    headers = {"x-request-id": "mine"}
    whole = server.http.post(MESSAGES, json=body(), headers=headers)
    assert (whole.status_code, whole.json()["error"]["type"]) == (status, kind)
    streamed = server.http.post(MESSAGES, json=body(stream=True), headers=headers)
    assert streamed.status_code == 200
    *_, last = events_of(streamed.text)
    assert last == whole.json()
    assert last["request_id"] == whole.headers["request-id"] == "mine"


def test_a_record_of_each_request(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("abc")
    headers = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03",
        "x-claude-code-session-id": "session-1",
    }
    before = len(server.records)
    answer = server.http.post(MESSAGES, json=body(stream=True), headers=headers)
    (record,) = server.ended(before + 1)[before:]
    assert (record.operation, record.stream) == ("chat", True)
    assert record.response_id == events_of(answer.text)[0]["message"]["id"]
    assert record.request_id == answer.headers["request-id"]
    assert record.traceparent == headers["traceparent"]
    assert record.conversation_id == "session-1"
    assert record.finish_reason is FinishReason.STOP
    assert record.usage is not None and record.usage.output_tokens == 3
    assert record.num_bytes == len(answer.content)
    edge = ["receive", "tokenize", "prepare", "dispatch"]
    assert [p.name for p in record.phases] == [*edge, "queue", "prefill", "decode", "stream"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": "k", "anthropic-version": "2023-06-01"},
        {"authorization": "Bearer k", "anthropic-version": "2026-10-21"},
        {"anthropic-version": "whenever", "anthropic-beta": "a,b,unheard-of-2031-01-01"},
    ],
)
def test_headers_of_every_client_are_in_order(
    stage: Stage, server: LiveServer, headers: dict[str, str]
) -> None:
    stage.script = text_script("x")
    url = f"{MESSAGES}?beta=true"
    assert server.http.post(url, json=body(), headers=headers).status_code == 200

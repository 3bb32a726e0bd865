"""The encoder on lists of events; what it says is read by the `anthropic` SDK itself."""

import json
import random
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest

from engine.types import FinishReason, KeepPrefix
from service.conversation import Conversation, GenerationOptions, GenerationRequest
from service.dialects.messages_decode import Diagnostics, MessagesRequest
from service.dialects.messages_encode import MessageStream, WholeMessage
from service.events import (
    Admitted,
    Completed,
    Event,
    Failed,
    PromptScored,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
    Usage,
)
from service.model_card import ModelCard
from tests.service.conftest import INFO, MODEL
from tests.service.endpoints.messages.calls import events_of, joined

CARD = ModelCard.of(INFO, ())
USAGE = Usage(prompt_tokens=10, cached_tokens=6, output_tokens=5)
STOPPED = Completed(FinishReason.STOP, USAGE)
CALLED = Completed(FinishReason.STOP, USAGE, num_tool_calls=2)
CUT = Completed(FinishReason.LENGTH, USAGE)


def request(asked: Diagnostics | None = None, max_tokens: int = 5) -> MessagesRequest:
    conversation = Conversation(())
    generation = GenerationRequest("msg_1", MODEL, conversation, GenerationOptions())
    return MessagesRequest(generation, max_tokens, True, asked)


def streamed(*events: Event, kept: tuple[KeepPrefix, ...] = (), **fields: Any) -> str:
    encoder = MessageStream(request(**fields), CARD, kept, "req_1")
    return b"".join(encoder.encode(e) for e in (Admitted(10), PromptScored(()), *events)).decode()


def whole(*events: Event, kept: tuple[KeepPrefix, ...] = (), **fields: Any) -> dict[str, Any]:
    *pieces, end = events
    assert isinstance(end, Completed)
    message = WholeMessage(request(**fields), CARD, Admitted(10, kept=kept))
    for event in pieces:
        message.add(event)
    answer: dict[str, Any] = json.loads(message.encode(end))
    return answer


def call(index: int, arguments: str, *, pieces: int = 3, done: bool = True) -> Iterator[Event]:
    yield ToolCallStarted(index, f"call_{index}", "get_weather")
    size = max(1, len(arguments) // pieces)
    for start in range(0, len(arguments), size):
        yield ToolCallDelta(index, arguments[start : start + size])
    if done:
        yield ToolCallDone(index)


ANSWER: tuple[Event, ...] = (
    ReasoningDelta("The user "),
    ReasoningDelta("wants 😸"),
    TextDelta("Let me "),
    TextDelta(""),
    TextDelta("see\u2028."),
    *call(0, '{"city": "K\\u00f6ln", "days": [1.0, 2]}'),
    TextDelta("And "),
    *call(1, "{}"),
    *call(2, ""),
    CALLED,
)


def test_blocks_follow_one_another_as_the_model_wrote_them() -> None:
    message = joined(events_of(streamed(*ANSWER)))
    assert message["content"] == [
        {"type": "thinking", "thinking": "The user wants 😸", "signature": "msg_1"},
        {"type": "text", "text": "Let me see\u2028."},
        {
            "type": "tool_use",
            "id": "toolu_0",
            "name": "get_weather",
            "input": {"city": "Köln", "days": [1.0, 2]},
        },
        {"type": "text", "text": "And "},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
        {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message == whole(*ANSWER)


def test_any_grouping_of_pieces_joins_to_the_same_message() -> None:
    expected = whole(*ANSWER)
    rng = random.Random(5)
    arguments = '{"city": "K\\u00f6ln", "days": [1.0, 2]}'
    for _ in range(50):
        cuts = rng.randint(1, len(arguments))
        events = (*ANSWER[:5], *call(0, arguments, pieces=cuts), *ANSWER[-8:])
        assert joined(events_of(streamed(*events))) == expected == whole(*events)


def test_frames_are_single_lines() -> None:
    for line in streamed(*ANSWER).splitlines():
        assert not line or line.startswith(("event: ", "data: "))


@pytest.mark.parametrize(
    ("end", "max_tokens", "reason", "stop"),
    [
        (STOPPED, 5, "end_turn", None),
        (Completed(FinishReason.STOP, USAGE, stop="END"), 5, "stop_sequence", "END"),
        (CALLED, 5, "tool_use", None),
        (CUT, 5, "max_tokens", None),
        (CUT, 6, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(end: Completed, max_tokens: int, reason: str, stop: str | None) -> None:
    events = (TextDelta("x"), end)
    for message in (
        joined(events_of(streamed(*events, max_tokens=max_tokens))),
        whole(*events, max_tokens=max_tokens),
    ):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


@pytest.mark.parametrize(
    ("num_kept", "written", "rest"), [(0, 0, 4), (5, 0, 4), (6, 0, 4), (8, 2, 2), (10, 4, 0)]
)
def test_the_prompt_is_split_in_three(num_kept: int, written: int, rest: int) -> None:
    kept = (KeepPrefix(min(num_kept, 3), 3600.0), KeepPrefix(num_kept, 300.0))
    expected = {
        "input_tokens": rest,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": 6,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    events = events_of(streamed(STOPPED, kept=kept))
    assert events[-2]["usage"] == expected
    assert whole(STOPPED, kept=kept)["usage"] == expected | {"service_tier": "standard"}
    first = events[0]["message"]["usage"]
    assert (first["output_tokens"], first["service_tier"]) == (1, "standard")
    assert sum(first[name] for name in first if name.endswith("input_tokens")) == 10
    assert joined(events)["usage"] == whole(STOPPED, kept=kept)["usage"]


def test_what_is_written_is_told_by_its_time_to_live() -> None:
    kept = (KeepPrefix(8, 3600.0), KeepPrefix(9, 300.0))
    usage = whole(STOPPED, kept=kept)["usage"]
    assert usage["cache_creation_input_tokens"] == 3
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": 1,
        "ephemeral_1h_input_tokens": 2,
    }


def test_thoughts_are_counted_apart() -> None:
    end = Completed(FinishReason.STOP, Usage(10, 6, 5, reasoning_tokens=3))
    for message in (joined(events_of(streamed(TextDelta("x"), end))), whole(end)):
        assert message["usage"]["output_tokens"] == 5
        assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_an_answer_of_nothing_has_no_blocks() -> None:
    assert [e["type"] for e in events_of(streamed(STOPPED))] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert whole(STOPPED)["content"] == []


@pytest.mark.parametrize("arguments", ["", '{"city": "K', "[1]", "7", "x"])
def test_a_call_without_whole_arguments_has_none(arguments: str) -> None:
    (block,) = whole(*call(0, arguments, done=False), CUT)["content"]
    assert block["input"] == {}


def test_a_failure_is_an_error_event() -> None:
    failed = Failed(FinishReason.ABORT, "going down")
    *_, last = events_of(streamed(TextDelta("x"), failed))
    assert last == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "going down",
            "details": {"error_code": "server_is_overloaded"},
        },
        "request_id": "req_1",
    }


def client(kind: str, answer: bytes) -> anthropic.Anthropic:
    """The SDK, with one answer for all it asks."""
    headers = {"content-type": kind}
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, content=answer, headers=headers)
    )
    http = httpx2.Client(transport=transport)
    return anthropic.Anthropic(base_url="http://test", api_key="none", http_client=http)


def test_the_sdk_reads_both_forms_alike() -> None:
    message = WholeMessage(request(), CARD, Admitted(10))
    for event in ANSWER[:-1]:
        message.add(event)
    asked: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with client("application/json", message.encode(CALLED)) as sdk:
        once = sdk.messages.create(**asked)
    with (
        client("text/event-stream", streamed(*ANSWER).encode()) as sdk,
        sdk.messages.stream(**asked) as events,
    ):
        kinds = [event.type for event in events]
        final = events.get_final_message()
    once.usage.cache_creation = None  # the SDK does not take it from a stream's last frame
    assert final.model_dump(exclude_none=True) == once.model_dump(exclude_none=True)
    assert [block.type for block in final.content] == [
        "thinking",
        "text",
        "tool_use",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert {"thinking", "signature", "text", "input_json"} < set(kinds)

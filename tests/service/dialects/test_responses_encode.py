"""Events to Responses frames: order, numbers, identities, payloads; errors of the WebSocket."""

import json
from typing import Any

import pytest

from engine.types import FinishReason
from service.dialects.responses_decode import ResponseCreate
from service.dialects.responses_encode import ResponseEncoder, ws_error
from service.errors import RETRY_SOON, ApiError, invalid
from service.events import (
    Admitted,
    Completed,
    Event,
    Failed,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
    Usage,
)
from tests.service.conftest import byte_assets

USAGE = Usage(prompt_tokens=10, cached_tokens=8, output_tokens=3)
TEXT_TYPES = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def encoder(stream_id: str | None = None, **body: Any) -> ResponseEncoder:
    create = ResponseCreate(model="default", input="hi", **body)
    return ResponseEncoder(
        "resp_1", create, "m", byte_assets().vocabulary, stream_id=stream_id, clock=lambda: 1000.5
    )


def frames(encoder: ResponseEncoder, *events: Event) -> list[dict[str, Any]]:
    encoded = [frame for event in events for frame in encoder.encode(event)]
    return [json.loads(frame) for frame in encoded]


def text_turn(encoder: ResponseEncoder, end: Event) -> list[dict[str, Any]]:
    return frames(encoder, Admitted(10), TextDelta('He"'), TextDelta("llo\n😀"), end)


def test_a_text_turn_has_every_event_in_order_with_its_payload() -> None:
    events = text_turn(encoder(), Completed(FinishReason.STOP, USAGE))
    assert [event["type"] for event in events] == [*TEXT_TYPES, "response.completed"]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert not any("stream_id" in event for event in events)
    created, progress, added, part, first, second, done, part_done, item_done, completed = events
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    item = {"id": "msg_1", "type": "message", "role": "assistant"}
    text = 'He"llo\n😀'
    whole = {"type": "output_text", "text": text, "annotations": []}
    final = item | {"status": "completed", "content": [whole]}
    assert created["response"] == progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    assert added["item"] == item | {"status": "in_progress", "content": []}
    assert part.items() >= (place | {"part": whole | {"text": ""}}).items()
    assert first.items() >= (place | {"delta": 'He"', "logprobs": []}).items()
    assert second["delta"] == "llo\n😀"
    assert done.items() >= (place | {"text": text, "logprobs": []}).items()
    assert part_done.items() >= (place | {"part": whole}).items()
    assert (item_done["output_index"], item_done["item"]) == (0, final)
    response = completed["response"]
    assert response["output"] == [final]
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert (response["status"], response["completed_at"]) == ("completed", 1000)


def test_the_response_object_echoes_the_request() -> None:
    whole = {"description": None, "parameters": None, "strict": None}
    tool = {"type": "function", "name": "w", **whole}
    body: dict[str, Any] = {
        "instructions": "be brief",
        "metadata": {"run": "7"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 9,
        "previous_response_id": "resp_0",
        "tools": [tool],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "store": False,
        "prompt_cache_key": "k",
        "user": "u",
    }
    (created, _) = frames(encoder(**body), Admitted(1))
    response = created["response"]
    assert {name: response[name] for name in body} == body
    assert (response["id"], response["object"], response["model"]) == ("resp_1", "response", "m")
    assert response["created_at"] == 1000
    assert response["error"] is response["incomplete_details"] is None
    plain = frames(encoder(), Admitted(1))[0]["response"]
    assert (plain["tools"], plain["tool_choice"], plain["store"]) == ([], "auto", True)
    assert (plain["metadata"], plain["parallel_tool_calls"]) == ({}, True)


def test_a_cut_answer_is_incomplete() -> None:
    last = text_turn(encoder(), Completed(FinishReason.LENGTH, USAGE))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_keeps_what_was_said() -> None:
    last = text_turn(encoder(), Failed(FinishReason.ERROR, "broke", USAGE))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "broke"}
    assert last["response"]["output"][0]["content"][0]["text"] == 'He"llo\n😀'
    early = frames(encoder(), Admitted(1), Failed(FinishReason.ABORT, "bye"))
    assert [event["type"] for event in early[2:]] == ["response.failed"]
    assert early[-1]["response"]["error"]["code"] == "server_is_overloaded"
    assert early[-1]["response"]["output"] == []


def test_a_silent_answer_still_has_its_item() -> None:
    events = frames(encoder(), Admitted(1), Completed(FinishReason.STOP, USAGE))
    assert [event["type"] for event in events] == [
        *(kind for kind in TEXT_TYPES if not kind.endswith("delta")),
        "response.completed",
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_warm_up_completes_without_output() -> None:
    usage = Usage(10, 0, 0)
    warm = encoder(generate=False)
    events = frames(warm, Admitted(10), Completed(FinishReason.LENGTH, usage))
    assert [event["type"] for event in events] == [*TEXT_TYPES[:2], "response.completed"]
    assert events[-1]["response"]["output"] == []
    assert events[-1]["response"]["usage"]["output_tokens"] == 0


def test_every_frame_of_a_named_lane_names_it() -> None:
    events = text_turn(encoder("a.b-1"), Completed(FinishReason.STOP, USAGE))
    assert {event["stream_id"] for event in events} == {"a.b-1"}


def test_progress_is_numbered_with_the_rest() -> None:
    one = encoder()
    numbers = [event["sequence_number"] for event in frames(one, Admitted(1))]
    refresh = json.loads(one.progress())
    assert refresh["type"] == "response.in_progress"
    numbers.append(refresh["sequence_number"])
    numbers += [event["sequence_number"] for event in frames(one, TextDelta("x"))]
    assert numbers == list(range(6))


@pytest.mark.parametrize("text", ["", "\u2028", "\x00\x1f", '\\"', "é😀"])
def test_a_delta_is_the_json_that_a_plain_encoder_would_make(text: str) -> None:
    one = encoder("lane")
    frames(one, Admitted(1), TextDelta("x"))
    deltas = frames(one, TextDelta(text))
    assert [delta["delta"] for delta in deltas] == ([text] if text else [])


def test_errors_are_nested_and_overload_says_when_to_retry() -> None:
    frame = json.loads(ws_error(invalid("input", "bad"), "lane"))
    assert frame == {
        "type": "error",
        "status": 400,
        "stream_id": "lane",
        "error": {
            "type": "invalid_request_error",
            "code": "invalid_value",
            "message": "bad",
            "param": "input",
        },
    }
    full = ApiError(
        429, "full", type="rate_limit_error", code="rate_limit_exceeded", headers=RETRY_SOON
    )
    frame = json.loads(ws_error(full))
    assert "stream_id" not in frame
    assert (frame["status"], frame["error"]["type"]) == (503, "server_error")
    assert frame["error"]["code"] == "server_is_overloaded"
    assert frame["headers"] == frame["error"]["headers"] == RETRY_SOON


CALL = (ToolCallStarted(0, "call_1", "w"), ToolCallDelta(0, '{"city":'), ToolCallDelta(0, '"ö"}'))


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    said = (ReasoningDelta("hm"), TextDelta("Look"), *CALL, ToolCallDone(0))
    events = frames(encoder(), Admitted(10), *said, Completed(FinishReason.STOP, USAGE))
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    assert added[2]["item"]["arguments"] == ""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in done]
    call = {"call_id": "call_1", "name": "w", "arguments": '{"city":"ö"}', "status": "completed"}
    assert done[2].items() >= call.items()
    assert events[-3]["arguments"] == '{"city":"ö"}'


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Completed(FinishReason.LENGTH, USAGE), "incomplete"),
        (Completed(FinishReason.STOP, USAGE), "completed"),
        (Failed(FinishReason.ERROR, "broken", USAGE), "failed"),
    ],
)
def test_a_call_that_was_cut_is_incomplete(end: Event, status: str) -> None:
    events = frames(encoder(), Admitted(10), *CALL[:2], end)
    response = events[-1]["response"]
    assert response["status"] == status
    [item] = response["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"city":')

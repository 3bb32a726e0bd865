"""The Responses dialect, outwards: canonical events to frames.

A frame is one JSON object as bytes; server-sent events and WebSocket differ only in how they wrap
it and in the shape of an error. `ResponseEncoder` knows no transport and keeps one response's
sequence numbers, so every event is numbered once, however it travels.
"""

import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from engine.types import FinishReason
from service.dialects.responses_decode import ResponseCreate, Steer
from service.errors import ApiError, from_failure
from service.events import Admitted, Completed, Event, Failed, TextDelta, Usage
from service.responses_store import ResponseStatus

Fields: TypeAlias = dict[str, Any]

_json = msgspec.json.Encoder().encode


class ResponseEncoder:
    """Frames of one response, from Admitted to exactly one terminal frame.

    Instructions, tools and the other echoed fields are encoded once and spliced into each frame
    that carries the whole response.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponseCreate,
        *,
        stream_id: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`stream_id` is echoed on every frame; `clock` is in seconds of the epoch."""
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._generates = body.generates
        self._clock = clock
        self._sequence_number = 0
        self._pieces: list[str] = []
        self._item_open = False
        self._output: list[Fields] = []
        self._head = _json(_echoed(response_id, body, clock()))[:-1] + b","
        lane = b"" if stream_id is None else b',"stream_id":' + _json(stream_id)
        self._tail = lane + b"}"
        self._delta_tail = b',"logprobs":[]' + self._tail
        self._delta_head = b',"item_id":%b,"output_index":0,"content_index":0,"delta":' % _json(
            self._item_id
        )
        self.started = False
        self.finished = False

    def encode(self, event: Event) -> list[bytes]:
        """Frames of one event, in order. Changes `started` and `finished`."""
        if isinstance(event, TextDelta):
            return self._delta(event.text)
        if isinstance(event, Admitted):
            self.started = True
            return [
                self._response_frame("response.created", "in_progress"),
                self.progress(),
            ]
        self.finished = True
        if isinstance(event, Completed):
            return self._completed(event)
        return self._failed(event)

    def progress(self) -> bytes:
        """A further `response.in_progress`: tells a waiting client that the response is alive."""
        return self._response_frame("response.in_progress", "in_progress")

    def _delta(self, text: str) -> list[bytes]:
        if not text:
            return []
        frames = [] if self._item_open else self._open_item()
        self._pieces.append(text)
        number = b"%d" % self._next_number()
        frames.append(_DELTA + number + self._delta_head + _json(text) + self._delta_tail)
        return frames

    def _completed(self, event: Completed) -> list[bytes]:
        status = final_status(event, generates=self._generates)
        frames: list[bytes] = []
        if self._generates:
            frames += [] if self._item_open else self._open_item()
            frames += self._close_item(status)
        frames.append(self._response_frame(f"response.{status}", status, usage=event.usage))
        return frames

    def _failed(self, event: Failed) -> list[bytes]:
        frames = self._close_item("incomplete") if self._item_open else []
        error: Fields = {
            "code": from_failure(event).code or "server_error",
            "message": event.message,
        }
        frames.append(
            self._response_frame("response.failed", "failed", usage=event.usage, error=error)
        )
        return frames

    def _open_item(self) -> list[bytes]:
        self._item_open = True
        item = self._item("in_progress", [])
        return [
            self._frame("response.output_item.added", {"output_index": 0, "item": item}),
            self._frame("response.content_part.added", self._place() | {"part": _part("")}),
        ]

    def _close_item(self, status: str) -> list[bytes]:
        text = "".join(self._pieces)
        item = self._item(status, [_part(text)])
        self._output.append(item)
        return [
            self._frame(
                "response.output_text.done", self._place() | {"text": text, "logprobs": []}
            ),
            self._frame("response.content_part.done", self._place() | {"part": _part(text)}),
            self._frame("response.output_item.done", {"output_index": 0, "item": item}),
        ]

    def _item(self, status: str, content: list[Fields]) -> Fields:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> Fields:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _frame(self, type: str, fields: Fields) -> bytes:
        head: Fields = {"type": type, "sequence_number": self._next_number()}
        return _json(head | fields)[:-1] + self._tail

    def _response_frame(
        self,
        type: str,
        status: ResponseStatus,
        *,
        usage: Usage | None = None,
        error: Fields | None = None,
    ) -> bytes:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        state = {
            "status": status,
            "completed_at": self._clock() if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": self._output,
            "usage": usage and _usage(usage),
        }
        head = b'{"type":"%b","sequence_number":%d,"response":' % (
            type.encode(),
            self._next_number(),
        )
        return head + self._head + _json(state)[1:] + self._tail

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def final_status(event: Completed | Failed, *, generates: bool) -> ResponseStatus:
    """How a response ended; a warm-up that computed its prompt is complete."""
    if isinstance(event, Failed):
        return "failed"
    cut = generates and event.finish_reason is FinishReason.LENGTH
    return "incomplete" if cut else "completed"


_DELTA: Final = b'{"type":"response.output_text.delta","sequence_number":'


def ws_error(error: ApiError, stream_id: str | None = None) -> bytes:
    """The nested error frame of the WebSocket, with `headers` where each client looks for them.

    Too much load is 503 `server_is_overloaded` here: it is the one code that agents retry.
    """
    inner: Fields = {
        "type": error.type,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    status = error.status
    if status == 429:
        status = 503
        inner |= {"type": "server_error", "code": "server_is_overloaded"}
    frame: Fields = {"type": "error", "status": status, "error": inner}
    if error.headers:
        inner["headers"] = frame["headers"] = error.headers
    if stream_id is not None:
        frame["stream_id"] = stream_id
    return _json(frame)


def steer_failed(steer: Steer) -> bytes:
    """The refusal of `response.steer`, which returns the input that was not used."""
    return _json(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": "This server does not steer running responses.",
            },
            "steer": {
                "previous_response_id": steer.previous_response_id,
                "input": steer.input,
            },
        }
    )


def _part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _echoed(response_id: str, body: ResponseCreate, created_at: float) -> Fields:
    """The fields of the response object that never change."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": body.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }

"""The Responses dialect, outwards: canonical events to frames.

A frame is one JSON object as bytes; server-sent events and WebSocket differ only in how they wrap
it and in the shape of an error. `ResponseEncoder` knows no transport and keeps one response's
sequence numbers, so every event is numbered once, however it travels.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from engine.text import Vocabulary
from engine.types import KeepPrefix
from service.cache.diagnosis import Diagnosis, Part
from service.conversation import DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from service.dialects.fields import RETENTION_S
from service.dialects.logprobs import ShownToken, shown_tokens
from service.dialects.responses_decode import ResponseCreate
from service.dialects.responses_entries import (
    Cancelled,
    Entry,
    Progress,
    ResponseStatus,
    final_status,
)
from service.dialects.responses_output import (
    MESSAGE,
    REASONING,
    OutputItem,
    call_item,
    message_item,
    reasoning_item,
)
from service.errors import ApiError, from_failure
from service.events import (
    Admitted,
    Completed,
    Failed,
    PromptScored,
    ReasoningDelta,
    TextDelta,
    TokenText,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
    Usage,
    num_written,
)

Fields: TypeAlias = dict[str, Any]

_TOOL: Final[Fields] = {"description": None, "parameters": None, "strict": None}
"""What a tool that is shown always has, also where its client left it out."""

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
        model: str,
        vocabulary: Vocabulary,
        *,
        stream_id: str | None = None,
        created_at: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`model` is the served id, whatever alias the body names; `stream_id` is echoed on every
        frame; `clock` is in seconds of the epoch, and tells the time of the end, and of the
        beginning unless `created_at` does."""
        self._response_id = response_id
        self._vocabulary = vocabulary
        self._tokens: tuple[TokenText, ...] = ()
        self._generates = body.generates
        self._clock = clock
        self._sequence_number = 0
        self._item: OutputItem | None = None
        self._output: list[Fields] = []
        self._diagnosis: Diagnosis | None = None
        self._kept: tuple[KeepPrefix, ...] = ()
        self._head = _json(_echoed(response_id, body, model, created_at or clock()))[:-1] + b","
        lane = b"" if stream_id is None else b',"stream_id":' + _json(stream_id)
        self._tail = lane + b"}"
        self.started = False
        self.finished = False
        self.response = b""

    def encode(self, event: Entry) -> list[bytes]:
        """Frames of one event, in order. Changes `started`, `finished` and `response`, which is
        the whole object as it was told last."""
        match event:
            case TextDelta():
                return self._said(event)
            case ReasoningDelta():
                self._tokens = ()
                return self._delta(REASONING, event.text)
            case ToolCallStarted():
                index = len(self._output) + (self._item is not None)
                call = call_item(self._response_id, index, event.index, event.id, event.name)
                return self._open(call)
            case ToolCallDelta():
                return self._delta(event.index, event.arguments)
            case ToolCallDone():
                return self._close("completed")
            case PromptScored():
                return []
            case Admitted():
                self.started = True
                self._diagnosis = event.diagnosis
                self._kept = event.kept
                return [
                    self._response_frame("response.created", "in_progress"),
                    self.progress(),
                ]
            case Completed():
                self.finished = True
                return self._completed(event)
            case Failed():
                self.finished = True
                return self._failed(event)
            case Cancelled():
                self.finished = True
                return self._cancelled(event)
            case Progress():
                return [self.progress()]

    def progress(self) -> bytes:
        """A further `response.in_progress`: tells a waiting client that the response is alive."""
        return self._response_frame("response.in_progress", "in_progress")

    def _said(self, event: TextDelta) -> list[bytes]:
        """A piece of the message. Tokens without text of their own go with the text that follows;
        those of a call or a thought are not shown."""
        if not event.tokens and not self._tokens:
            return self._delta(MESSAGE, event.text)
        tokens = (*self._tokens, *event.tokens)
        self._tokens = tokens
        if not event.text:
            return []
        self._tokens = ()
        return self._delta(MESSAGE, event.text, shown_tokens(tokens, self._vocabulary))

    def _delta(
        self, key: str | int, text: str, tokens: list[ShownToken] | None = None
    ) -> list[bytes]:
        """A piece of the item `key`, which is opened where it is not the one that grows."""
        if not text:
            return []
        frames: list[bytes] = []
        item = self._item
        if item is None or item.key != key:
            index = len(self._output) + (item is not None)
            make = reasoning_item if key == REASONING else message_item
            item = make(self._response_id, index)
            frames = self._open(item)
        item.add(text)
        head, number = item.delta
        if tokens:
            number = item.add_tokens(tokens)
        frames.append(head + _json(text) + number + b"%d" % self._next_number() + self._tail)
        return frames

    def _completed(self, event: Completed) -> list[bytes]:
        status = final_status(event, generates=self._generates)
        frames: list[bytes] = []
        if self._generates and self._item is None and not self._output:
            frames += self._open(message_item(self._response_id, 0))
        frames += self._interrupt(status)
        frames.append(self._response_frame(f"response.{status}", status, usage=event.usage))
        return frames

    def _failed(self, event: Failed) -> list[bytes]:
        frames = self._close("incomplete")
        error: Fields = {
            "code": from_failure(event).code or "server_error",
            "message": event.message,
        }
        frames.append(
            self._response_frame("response.failed", "failed", usage=event.usage, error=error)
        )
        return frames

    def _cancelled(self, event: Cancelled) -> list[bytes]:
        frames = self._close("incomplete")
        if event.steered:
            end = self._response_frame(
                "response.incomplete", "incomplete", usage=event.usage, reason="steered"
            )
        else:
            end = self._response_frame("response.failed", "cancelled", usage=event.usage)
        return [*frames, end]

    def _open(self, item: OutputItem) -> list[bytes]:
        """Begin an item; the one before it has ended."""
        frames = self._interrupt("completed")
        self._item = item
        return frames + item.opened(self._frame)

    def _interrupt(self, status: str) -> list[bytes]:
        """End the item that grows because something else comes: a call is incomplete then."""
        cut = self._item is not None and isinstance(self._item.key, int)
        return self._close("incomplete" if cut else status)

    def _close(self, status: str) -> list[bytes]:
        """End the item that grows, if there is one."""
        tokens, self._tokens = self._tokens, ()
        if self._item is None:
            return []
        if self._item.key == MESSAGE:
            self._item.add_tokens(shown_tokens(tokens, self._vocabulary))
        frames, item = self._item.closed(self._frame, status)
        self._item = None
        self._output.append(item)
        return frames

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
        reason: str = "max_output_tokens",
    ) -> bytes:
        incomplete = {"reason": reason} if status == "incomplete" else None
        state = {
            "status": status,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": self._output,
            "usage": usage and _usage(usage, self._kept),
            "prompt_cache_diagnostics": _diagnostics(self._diagnosis, usage),
        }
        head = b'{"type":"%b","sequence_number":%d,"response":' % (
            type.encode(),
            self._next_number(),
        )
        self.response = self._head + _json(state)[1:]
        return head + self.response + self._tail

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


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


_REASONS: Final[dict[Part, str]] = {
    "scope": "prompt_cache_key_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
}


def _diagnostics(diagnosis: Diagnosis | None, usage: Usage | None) -> Fields | None:
    """What became of the prefix that an earlier response had computed; told when it is known. What
    went on from it and yet found nothing has no reason in this protocol."""
    if diagnosis is None or usage is None:
        return None
    if not diagnosis.found:
        return {"type": "comparison_response_not_found"}
    if diagnosis.part:
        return {
            "type": "cache_miss",
            "reason": _REASONS[diagnosis.part],
            "cache_missed_tokens": diagnosis.num_missed,
            "comparison_reusable_tokens": diagnosis.num_shared,
        }
    return {"type": "cache_hit" if usage.cached_tokens else "unavailable"}


def _cache_options(body: ResponseCreate) -> Fields:
    """What the cache does with the prompt: beginnings are found without being marked."""
    asked = body.prompt_cache_options
    ttl = asked.ttl if asked is not None and asked.ttl in ("30m", "12h") else "30m"
    return {"mode": "implicit", "ttl": ttl, "comparison_response_id": body.comparison_id}


def _usage(usage: Usage, kept: Sequence[KeepPrefix]) -> Fields:
    details: Fields = {
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
    }
    # Only what the client asked to keep for so long: a lane's own five minutes are neither.
    lasting = [each for each in kept if each.ttl_s >= RETENTION_S["30m"]]
    if lasting:
        longest = [each for each in lasting if each.ttl_s >= RETENTION_S["12h"]]
        for_12h = num_written(usage, longest)
        details["cache_write_tokens_details"] = {
            "ttl_30m_tokens": num_written(usage, lasting) - for_12h,
            "ttl_12h_tokens": for_12h,
        }
    fields: Fields = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
    return fields if usage.cache is None else {**fields, "cache": usage.cache}


def _format(body: ResponseCreate) -> Fields:
    """The format of the text, with all that its kind always shows."""
    given = body.text.format if body.text else None
    if given is None:
        return {"type": "text"}
    shown: Fields = msgspec.to_builtins(given)
    if given.type != "json_schema":
        return shown
    return {"description": None, "strict": True, **shown}


def _echoed(response_id: str, body: ResponseCreate, model: str, created_at: float) -> Fields:
    """The fields of the response object that never change."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created_at),
        "model": model,
        "background": body.background is True,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_options": _cache_options(body),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_TOOL | tool for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": DEFAULT_TOP_P if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }

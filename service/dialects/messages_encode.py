"""Anthropic Messages, the answer: events of the generation path to JSON and SSE frames.

Content blocks follow one another in the order in which the model wrote them; a block grows until
an event of another kind comes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from engine.types import FinishReason, KeepPrefix
from service.cache.diagnosis import Diagnosis, Part
from service.dialects import wire
from service.dialects.messages_decode import MessagesRequest
from service.dialects.messages_errors import encode_error
from service.dialects.messages_items import TTL_S
from service.errors import from_failure
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
    num_written,
)
from service.model_card import ModelCard

_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}

_TIER: Final = {"service_tier": "standard"}
_to_json = msgspec.json.encode


class MessageStream:
    """Encodes one streamed answer, each event to whole SSE frames.

    How much of the prompt was cached is known only when it is admitted to the engine, so the
    usage of the last frames corrects that of the first.
    """

    def __init__(
        self,
        request: MessagesRequest,
        card: ModelCard,
        kept: tuple[KeepPrefix, ...],
        request_id: str,
    ) -> None:
        """`kept`: the beginnings of the prompt up to its cache breakpoints."""
        self._request = request
        self._card = card
        self._kept = kept
        self._request_id = request_id
        self._num_blocks = 0
        self._kind: str | None = None
        self._delta = b""

    def encode(self, event: Event) -> bytes:
        """The frames of an event."""
        match event:
            case TextDelta():
                return self._grow("text", event.text)
            case ReasoningDelta():
                return self._grow("thinking", event.text)
            case ToolCallStarted():
                return self._start("tool_use", {**_call(event), "input": {}})
            case ToolCallDelta():
                return self._grow("tool_use", event.arguments)
            case ToolCallDone():
                return self._stop()
            case Admitted():
                return self._begin(event)
            case PromptScored():
                return b""
            case Completed():
                return self._stop() + self._end(event)
            case Failed():
                error = encode_error(from_failure(event), self._request_id)
                return b"event: error\ndata: " + error + b"\n\n"

    def keep_alive(self) -> bytes:
        """An event that clients drop."""
        return _PING

    def _begin(self, event: Admitted) -> bytes:
        usage = _usage(Usage(event.prompt_tokens, 0, 1), self._kept) | _TIER
        message = _message(self._request, self._card, [], None, None, usage, event.diagnosis)
        return _frame("message_start", {"message": message})

    def _grow(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        started = b"" if self._kind == kind else self._start(kind, {_DELTAS[kind][1]: ""})
        return started + self._delta + wire.one_line(_to_json(text)) + b"}}\n\n"

    def _start(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        stopped = self._stop()
        index = self._num_blocks
        self._kind = kind
        self._num_blocks += 1
        delta, name = _DELTAS[kind]
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (index, delta.encode(), name.encode())
        )
        block = {"type": kind, **fields}
        if kind == "thinking":
            block["signature"] = ""
        return stopped + _frame("content_block_start", {"index": index, "content_block": block})

    def _stop(self) -> bytes:
        if self._kind is None:
            return b""
        index = self._num_blocks - 1
        signed = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(self._request)}
            signed = _frame("content_block_delta", {"index": index, "delta": delta})
        self._kind = None
        return signed + _frame("content_block_stop", {"index": index})

    def _end(self, end: Completed) -> bytes:
        delta = {"stop_reason": _stop_reason(self._request, end), "stop_sequence": end.stop}
        usage = _usage(end.usage, self._kept) | _details(end.usage, self._kept)
        return _frame("message_delta", {"delta": delta, "usage": usage}) + _frame(
            "message_stop", {}
        )


@dataclass(slots=True)
class _Block:
    kind: str
    fields: dict[str, Any]
    pieces: list[str] = field(default_factory=list)


class WholeMessage:
    """Collects one unstreamed answer: its blocks are the streamed ones, joined."""

    def __init__(self, request: MessagesRequest, card: ModelCard, admitted: Admitted) -> None:
        self._request = request
        self._card = card
        self._admitted = admitted
        self._blocks: list[_Block] = []

    def add(self, event: Event) -> None:
        """Take in a piece; events that are none are ignored."""
        match event:
            case TextDelta():
                self._grow("text", event.text)
            case ReasoningDelta():
                self._grow("thinking", event.text)
            case ToolCallStarted():
                self._blocks.append(_Block("tool_use", _call(event)))
            case ToolCallDelta():
                self._blocks[-1].pieces.append(event.arguments)
            case _:
                pass

    def encode(self, end: Completed) -> bytes:
        """The answer's JSON."""
        content = [self._content(block) for block in self._blocks]
        reason = _stop_reason(self._request, end)
        admitted = self._admitted
        kept = admitted.kept
        usage = _usage(end.usage, kept) | _details(end.usage, kept) | _TIER
        return _to_json(
            _message(
                self._request, self._card, content, reason, end.stop, usage, admitted.diagnosis
            )
        )

    def _grow(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind, {}))
        self._blocks[-1].pieces.append(text)

    def _content(self, block: _Block) -> dict[str, Any]:
        text = "".join(block.pieces)
        if block.kind == "tool_use":
            return {"type": "tool_use", **block.fields, "input": _input(text)}
        content = {"type": block.kind, block.kind: text}
        if block.kind == "thinking":
            content["signature"] = _signature(self._request)
        return content


def _frame(name: str, fields: Mapping[str, Any]) -> bytes:
    data = wire.one_line(_to_json({"type": name, **fields}))
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _message(
    request: MessagesRequest,
    card: ModelCard,
    content: list[dict[str, Any]],
    stop_reason: str | None,
    stop: str | None,
    usage: dict[str, Any],
    diagnosis: Diagnosis | None,
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": request.generation.id,
        "type": "message",
        "role": "assistant",
        "model": card.id,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop,
        "usage": usage,
    }
    if request.diagnostics is not None:
        message["diagnostics"] = _diagnostics(diagnosis)
    return message


_REASONS: Final[dict[Part, str]] = {
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}


def _diagnostics(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    """Where the prompt leaves the earlier one; null where it does not, or there is none."""
    if diagnosis is None or not diagnosis.part:
        missing = diagnosis is not None and not diagnosis.found
        return {"cache_miss_reason": {"type": "previous_message_not_found"}} if missing else None
    reason = {
        "type": _REASONS[diagnosis.part],
        "cache_missed_input_tokens": diagnosis.num_missed,
    }
    return {"cache_miss_reason": reason}


def _stop_reason(request: MessagesRequest, end: Completed) -> str:
    if end.finish_reason is FinishReason.LENGTH:
        cut = end.usage.output_tokens < request.max_tokens
        return "model_context_window_exceeded" if cut else "max_tokens"
    if end.num_tool_calls:
        return "tool_use"
    return "end_turn" if end.stop is None else "stop_sequence"


def _usage(usage: Usage, kept: Sequence[KeepPrefix]) -> dict[str, Any]:
    """The prompt's tokens in three parts: read from the cache; written to it before the last
    breakpoint; the rest. Their sum is the prompt."""
    written = num_written(usage, kept)
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
    return fields if usage.cache is None else {**fields, "cache": usage.cache}


def _details(usage: Usage, kept: Sequence[KeepPrefix]) -> dict[str, Any]:
    """What is known at the end only: clients do not correct these of the first frame."""
    for_1h = num_written(usage, [each for each in kept if each.ttl_s >= TTL_S["1h"]])
    return {
        "cache_creation": {
            "ephemeral_5m_input_tokens": num_written(usage, kept) - for_1h,
            "ephemeral_1h_input_tokens": for_1h,
        },
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _signature(request: MessagesRequest) -> str:
    """Opaque to clients, who must send it back; what was thought is not read again."""
    return request.generation.id


def _call(event: ToolCallStarted) -> dict[str, Any]:
    """A call's id as this protocol writes them, where the model's template does not bind it."""
    call_id = event.id
    if call_id.startswith("call_"):
        call_id = f"toolu_{call_id.removeprefix('call_')}"
    return {"id": call_id, "name": event.name}


def _input(arguments: str) -> msgspec.Raw:
    """A call's arguments as they were written; a call that was cut before they were whole has
    none."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())

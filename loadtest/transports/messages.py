"""Anthropic Messages, streamed."""

from typing import Any

import msgspec

from loadtest.measure.sample import Kind, RequestError, Sample, Usage
from loadtest.transports.base import Dialogue, Target, open_http
from loadtest.transports.sse import stream_events

PATH = "/v1/messages"


class WireUsage(msgspec.Struct):
    """Counts so far; `input_tokens` are those that no cache had a part in."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None


class Message(msgspec.Struct):
    """What message_start says of the message."""

    usage: WireUsage | None = None


class Delta(msgspec.Struct):
    """A piece of a block, or the end of a message."""

    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None
    stop_reason: str | None = None


class Event(msgspec.Struct):
    """An event of the stream."""

    type: str
    message: Message | None = None
    delta: Delta | None = None
    usage: WireUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Event)


class Messages:
    """The whole conversation is sent each turn. The system prompt carries a cache breakpoint, so
    that servers which cache only where they are told to can show it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = open_http(target)

    async def send(self, dialogue: Dialogue, sample: Sample) -> None:
        counts = WireUsage()

        def on_event(data: bytes, now_s: float) -> bool:
            try:
                event = _decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise RequestError(Kind.PROTOCOL, f"{error}: {data[:120]!r}") from error
            if event.type == "error":
                raise RequestError(Kind.REPORTED, str(event.error)[:300])
            usage = event.usage or (event.message.usage if event.message else None)
            if usage is not None:
                _update(counts, usage)
                sample.usage = _read(counts)
            if event.delta is not None:
                delta = event.delta
                sample.add(delta.text or delta.partial_json or delta.thinking or "", now_s)
                sample.finished = sample.finished or delta.stop_reason is not None
            return event.type == "message_stop"

        body = self._target.body(_fields(self._target, dialogue, sample))
        await stream_events(self._http, self._target, PATH, body, sample, on_event)
        if not sample.finished:
            raise RequestError(Kind.CUT, "the stream ended without a stop reason")

    async def leave(self, dialogue: Dialogue) -> None:
        pass

    async def close(self) -> None:
        await self._http.close()


def _fields(target: Target, dialogue: Dialogue, sample: Sample) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": target.model,
        "messages": dialogue.messages(),
        "max_tokens": sample.max_tokens,
        "temperature": 0,
        "stream": True,
    }
    if dialogue.system:
        block = {"type": "text", "text": dialogue.system}
        fields["system"] = [block | {"cache_control": {"type": "ephemeral"}}]
    if dialogue.tools:
        fields["tools"] = [
            {
                "name": tool["name"],
                "description": tool["description"],
                "input_schema": tool["parameters"],
            }
            for tool in dialogue.tools
        ]
    return fields


def _update(counts: WireUsage, new: WireUsage) -> None:
    """Later counts replace earlier ones, and leave alone what they don't mention."""
    for name in counts.__struct_fields__:
        value = getattr(new, name)
        if value is not None:
            setattr(counts, name, value)


def _read(counts: WireUsage) -> Usage:
    cached = counts.cache_read_input_tokens or 0
    created = counts.cache_creation_input_tokens or 0
    prompt = (counts.input_tokens or 0) + cached + created
    return Usage(prompt, counts.output_tokens or 0, cached)

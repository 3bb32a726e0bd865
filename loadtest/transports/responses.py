"""Responses: the events that its SSE and WebSocket forms share, and the SSE form."""

from typing import Any

import msgspec

from loadtest.measure.sample import Kind, RequestError, Sample, Usage
from loadtest.transports.base import Dialogue, Target, open_http
from loadtest.transports.sse import stream_events

PATH = "/v1/responses"


class InputDetails(msgspec.Struct, frozen=True):
    """Parts of the prompt's count."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Parts of the answer's count."""

    reasoning_tokens: int = 0


class WireUsage(msgspec.Struct):
    """`usage` of a response."""

    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class Incomplete(msgspec.Struct):
    """Why a response stopped early."""

    reason: str | None = None


class Response(msgspec.Struct):
    """What a lifecycle event says of the response."""

    id: str
    usage: WireUsage | None = None
    error: Any = None
    incomplete_details: Incomplete | None = None


class Event(msgspec.Struct):
    """A frame or an SSE event. Errors are flat on SSE and nested on WebSocket."""

    type: str
    stream_id: str | None = None
    delta: Any = None
    response: Response | None = None
    error: Any = None
    status: int | None = None
    code: str | None = None
    message: str | None = None


_decoder = msgspec.json.Decoder(Event)


def decode(data: bytes) -> Event:
    """One event. Raises RequestError."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RequestError(Kind.PROTOCOL, f"{error}: {data[:120]!r}") from error


def take(event: Event, sample: Sample, now_s: float) -> bool:
    """Note an event in the sample; True for the last one. Raises RequestError for an error.

    An answer that reached its token limit is `incomplete`, and good: the limit was asked for.
    """
    if isinstance(event.delta, str) and event.type.endswith(".delta"):
        sample.add(event.delta, now_s)
        return False
    if event.type == "error":
        told = event.error if event.error is not None else f"{event.code}: {event.message}"
        raise _reported(event.status, str(told))
    if event.type not in ("response.completed", "response.incomplete", "response.failed"):
        return False
    response = event.response
    if response is None:
        raise RequestError(Kind.PROTOCOL, f"{event.type} without a response")
    if event.type == "response.failed":
        raise _reported(None, str(response.error))
    reason = response.incomplete_details.reason if response.incomplete_details else None
    if event.type == "response.incomplete" and reason != "max_output_tokens":
        raise RequestError(Kind.CUT, f"the response is incomplete: {reason}")
    if response.usage is not None:
        sample.usage = Usage(
            response.usage.input_tokens,
            response.usage.output_tokens,
            response.usage.input_tokens_details.cached_tokens,
            response.usage.output_tokens_details.reasoning_tokens,
        )
    sample.response_id = response.id
    sample.finished = True
    return True


def _reported(status: int | None, message: str) -> RequestError:
    kind = {429: Kind.RATE_LIMITED, 503: Kind.OVERLOADED}.get(status or 0, Kind.REPORTED)
    return RequestError(kind, message[:300])


def fields(target: Target, dialogue: Dialogue, sample: Sample) -> dict[str, Any]:
    """The request but for `input`. Instructions and tools are never inherited: each turn says
    them again."""
    said: dict[str, Any] = {
        "model": target.model,
        "max_output_tokens": sample.max_tokens,
        "temperature": 0,
    }
    if dialogue.system:
        said["instructions"] = dialogue.system
    if dialogue.tools:
        said["tools"] = [{"type": "function", **tool} for tool in dialogue.tools]
    return said


class ResponsesSse:
    """The whole conversation is sent each turn, as agents' libraries do over HTTP."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = open_http(target)

    async def send(self, dialogue: Dialogue, sample: Sample) -> None:
        def on_event(data: bytes, now_s: float) -> bool:
            return data == b"[DONE]" or take(decode(data), sample, now_s)

        said = fields(self._target, dialogue, sample)
        body = self._target.body(said | {"input": dialogue.messages(), "stream": True})
        await stream_events(self._http, self._target, PATH, body, sample, on_event)
        if not sample.finished:
            raise RequestError(Kind.CUT, "the stream ended without response.completed")

    async def leave(self, dialogue: Dialogue) -> None:
        pass

    async def close(self) -> None:
        await self._http.close()

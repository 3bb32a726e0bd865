"""Chat Completions over HTTP, streamed (SSE) and whole (JSON)."""

import time
from typing import Any

import aiohttp
import msgspec

from loadtest.measure.sample import Kind, RequestError, Sample, Usage
from loadtest.transports.base import (
    Dialogue,
    StallWatch,
    Target,
    open_http,
    post,
    told,
)
from loadtest.transports.sse import stream_events

PATH = "/v1/chat/completions"


class Details(msgspec.Struct):
    """Parts of a count."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """`usage` of a chunk or an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None

    def read(self) -> Usage:
        """In our words."""
        prompt, output = self.prompt_tokens_details, self.completion_tokens_details
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            (prompt.cached_tokens or 0) if prompt else 0,
            (output.reasoning_tokens or 0) if output else 0,
        )


class Function(msgspec.Struct):
    """What is called."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A call, or a fragment of one."""

    function: Function | None = None


class Message(msgspec.Struct):
    """A message, or what a chunk adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    def text(self) -> str:
        """Everything that was generated, calls included."""
        said = self.content or self.reasoning or self.reasoning_content or ""
        for call in self.tool_calls or ():
            if call.function:
                said += (call.function.name or "") + (call.function.arguments or "")
        return said


class Choice(msgspec.Struct):
    """The one choice we ask for."""

    delta: Message | None = None
    message: Message | None = None
    finish_reason: str | None = None


class Answer(msgspec.Struct):
    """A chunk or a whole answer."""

    choices: list[Choice] = []
    usage: WireUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Answer)


def _body(target: Target, dialogue: Dialogue, sample: Sample, *, stream: bool) -> bytes:
    messages = dialogue.messages()
    if dialogue.system:
        messages.insert(0, {"role": "system", "content": dialogue.system})
    fields: dict[str, Any] = {
        "model": target.model,
        "messages": messages,
        "max_tokens": sample.max_tokens,
        "temperature": 0,
    }
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if dialogue.tools:
        fields["tools"] = [{"type": "function", "function": tool} for tool in dialogue.tools]
    return target.body(fields)


def _decode(data: bytes) -> Answer:
    try:
        answer = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RequestError(Kind.PROTOCOL, f"{error}: {data[:120]!r}") from error
    if answer.error:
        raise RequestError(Kind.REPORTED, str(answer.error)[:300])
    return answer


class ChatSse:
    """`stream: true`; a stream without a finish reason counts as cut, whatever else it sent."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = open_http(target)

    async def send(self, dialogue: Dialogue, sample: Sample) -> None:
        def on_event(data: bytes, now_s: float) -> bool:
            if data == b"[DONE]":
                return True
            answer = _decode(data)
            if answer.usage is not None:
                sample.usage = answer.usage.read()
            for choice in answer.choices:
                if choice.delta is not None:
                    sample.add(choice.delta.text(), now_s)
                sample.finished = sample.finished or choice.finish_reason is not None
            return False

        body = _body(self._target, dialogue, sample, stream=True)
        await stream_events(self._http, self._target, PATH, body, sample, on_event)
        if not sample.finished:
            raise RequestError(Kind.CUT, "the stream ended without a finish reason")

    async def leave(self, dialogue: Dialogue) -> None:
        pass

    async def close(self) -> None:
        await self._http.close()


class ChatJson:
    """One answer in one piece: it has an end-to-end time but no first token and no gaps."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = open_http(target)

    async def send(self, dialogue: Dialogue, sample: Sample) -> None:
        body = _body(self._target, dialogue, sample, stream=False)
        sample.streamed = False
        sample.begin(len(body))
        try:
            async with (
                StallWatch(self._target.stall_s),
                await post(self._http, self._target, PATH, body) as response,
            ):
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise told(error) from error
        sample.bytes_down += len(data)
        answer = _decode(data)
        if not answer.choices or answer.choices[0].message is None:
            raise RequestError(Kind.PROTOCOL, f"an answer without a message: {data[:120]!r}")
        sample.add(answer.choices[0].message.text(), time.perf_counter())
        sample.usage = answer.usage.read() if answer.usage else None
        sample.finished = answer.choices[0].finish_reason is not None

    async def leave(self, dialogue: Dialogue) -> None:
        pass

    async def close(self) -> None:
        await self._http.close()

"""Server-sent events: one answer's events to one client, at the client's pace.

Nothing is queued here. A frame is written as soon as it is made, and while the client takes nothing
its writer waits: it reads no more of its generation, which stops in the engine for want of credit.
What was said meanwhile is one event when it reads on.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Protocol

import anyio
from starlette.types import Scope, Send

from service.config import Limits
from service.events import Completed, Event, Failed, RequestRecord
from service.transport.http import HALF_CLOSE

PROBE_PAUSE_S = 0.02
_ENDS = (Completed, Failed)
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class KeepAlive(Protocol):
    """What fills a silence."""

    def keep_alive(self) -> bytes: ...


class StreamEncoder(KeepAlive, Protocol):
    """What a dialect makes of events: whole SSE frames."""

    def encode(self, event: Event) -> bytes: ...


class ChoiceEncoder(KeepAlive, Protocol):
    """The same, for an answer of several choices."""

    def encode(self, event: Event, index: int) -> bytes: ...


async def send_events(
    scope: Scope,
    send: Send,
    first: Event,
    events: AsyncGenerator[Event, None],
    encoder: StreamEncoder,
    record: RequestRecord,
    limits: Limits,
) -> None:
    """Write `first`, then `events`, until the terminal one.

    The encoder's keep-alive is sent before the client has heard nothing for `limits.keep_alive_s`.
    The caller closes `events` and watches for disconnects.
    """

    async def say(line: _Line) -> None:
        await write(line, first)
        async for event in events:
            if isinstance(event, _ENDS):
                line.ended = True
            await write(line, event)

    async def write(line: _Line, event: Event) -> None:
        if frame := encoder.encode(event):
            record.num_frames += 1
            record.num_bytes += len(frame)
            await line.write(frame)

    await _answer(scope, send, say, encoder, limits)


async def send_choices(
    scope: Scope,
    send: Send,
    first: Sequence[Event],
    choices: Sequence[AsyncGenerator[Event, None]],
    encoder: ChoiceEncoder,
    records: Sequence[RequestRecord],
    limits: Limits,
) -> None:
    """As `send_events`, for generations side by side: until all have ended, or one has failed,
    after which nothing is said of the others."""
    num_running = len(choices)
    failure: tuple[Failed, int] | None = None

    async def say(line: _Line) -> None:
        for index, event in enumerate(first):
            await write(line, event, index)
        async with anyio.create_task_group() as tasks:
            for index, events in enumerate(choices):
                tasks.start_soon(say_choice, line, events, index, tasks.cancel_scope)
        if failure is not None:
            line.ended = True
            await write(line, *failure)

    async def say_choice(
        line: _Line,
        events: AsyncGenerator[Event, None],
        index: int,
        all_choices: anyio.CancelScope,
    ) -> None:
        nonlocal num_running, failure
        async for event in events:
            if failure is not None:
                return
            if isinstance(event, Failed):
                failure = event, index
                all_choices.cancel()
                return
            if isinstance(event, _ENDS):
                num_running -= 1
                line.ended = not num_running
            await write(line, event, index)

    async def write(line: _Line, event: Event, index: int) -> None:
        if frame := encoder.encode(event, index):
            records[index].num_frames += 1
            records[index].num_bytes += len(frame)
            await line.write(frame)

    await _answer(scope, send, say, encoder, limits)


async def send_frames(
    scope: Scope,
    send: Send,
    frames: AsyncGenerator[bytes, None],
    silence: KeepAlive,
    limits: Limits,
) -> None:
    """As `send_events`, for frames that are made already: until there are no more."""

    async def say(line: _Line) -> None:
        async for frame in frames:
            await line.write(frame)

    await _answer(scope, send, say, silence, limits)


class _Line:
    """The way to one client. `ended`: the last frame is being written."""

    def __init__(self, send: Send, silence: KeepAlive) -> None:
        self.ended = False
        self._send = send
        self._silence = silence
        self._num_writing = 0
        self._quiet = False

    async def write(self, frame: bytes) -> None:
        """Write a frame; waits, before, until the client has taken enough of the others."""
        self._quiet = False
        self._num_writing += 1
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})
        self._num_writing -= 1

    async def keep_alive(self, silence_s: float) -> None:
        """Let no silence be longer."""
        while True:
            self._quiet = True
            await anyio.sleep(silence_s / 2)
            if self._quiet:
                await self._break_silence()

    async def probe(self, half_closed: asyncio.Event) -> None:
        """When the client has closed its side, find out whether it still reads.

        A half-closed and a closed connection look the same until something is written: a closed
        one answers the first write with a reset, which the second one meets.
        """
        await half_closed.wait()
        for _ in range(2):
            await self._break_silence()
            await anyio.sleep(PROBE_PAUSE_S)

    async def _break_silence(self) -> None:
        """Not while a frame waits for the client, nor after the last."""
        if not (self.ended or self._num_writing):
            await self.write(self._silence.keep_alive())


async def _answer(
    scope: Scope,
    send: Send,
    say: Callable[[_Line], Coroutine[Any, Any, None]],
    silence: KeepAlive,
    limits: Limits,
) -> None:
    """An answer of what `say` writes."""
    line = _Line(send, silence)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    async with anyio.create_task_group() as helping:
        helping.start_soon(line.keep_alive, limits.keep_alive_s)
        peer = scope.get("extensions", {}).get(HALF_CLOSE)
        if peer is not None:
            helping.start_soon(line.probe, peer["event"])
        # A task of its own: what wakes it at every token need not pass through the whole stack.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say, line)
        line.ended = True
        helping.cancel_scope.cancel()
    await send({"type": "http.response.body", "body": b""})

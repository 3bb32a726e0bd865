"""Server-sent events: one generation's events to one client, at the client's pace."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import anyio
from starlette.types import Scope, Send

from service.config import Limits
from service.events import Completed, Event, Failed, RequestRecord
from service.transport.http import HALF_CLOSE
from service.transport.outbox import Outbox, OutboxClosed

PROBE_PAUSE_S = 0.02
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

    Frames that are ready together go out in one write. After `limits.keep_alive_s` of silence
    the encoder's keep-alive is sent. The caller closes `events` and watches for disconnects.
    """

    async def read(outbox: Outbox[bytes]) -> None:
        await outbox.put(encode(first))
        async for event in events:
            await outbox.put(encode(event))
            if isinstance(event, Completed | Failed):
                outbox.close()

    def encode(event: Event) -> bytes:
        frame = encoder.encode(event)
        record.num_frames += 1
        record.num_bytes += len(frame)
        return frame

    await _send_frames(scope, send, read, encoder, limits)


async def send_choices(
    scope: Scope,
    send: Send,
    first: Sequence[Event],
    choices: Sequence[AsyncGenerator[Event, None]],
    encoder: ChoiceEncoder,
    records: Sequence[RequestRecord],
    limits: Limits,
) -> None:
    """As `send_events`, for generations side by side: until all have ended, or one has failed."""

    async def read(outbox: Outbox[bytes]) -> None:
        for index, event in enumerate(first):
            await put(outbox, event, index)
        async with anyio.create_task_group() as tasks:
            for index, events in enumerate(choices):
                tasks.start_soon(read_choice, outbox, events, index, tasks.cancel_scope)
        outbox.close()

    async def read_choice(
        outbox: Outbox[bytes],
        events: AsyncGenerator[Event, None],
        index: int,
        all_choices: anyio.CancelScope,
    ) -> None:
        async for event in events:
            await put(outbox, event, index)
            if isinstance(event, Failed):
                all_choices.cancel()
                return

    async def put(outbox: Outbox[bytes], event: Event, index: int) -> None:
        if frame := encoder.encode(event, index):
            records[index].num_frames += 1
            records[index].num_bytes += len(frame)
            await outbox.put(frame)

    await _send_frames(scope, send, read, encoder, limits)


async def send_frames(
    scope: Scope,
    send: Send,
    frames: AsyncGenerator[bytes, None],
    silence: KeepAlive,
    limits: Limits,
) -> None:
    """As `send_events`, for frames that are made already: until there are no more."""

    async def read(outbox: Outbox[bytes]) -> None:
        async for frame in frames:
            await outbox.put(frame)
        outbox.close()

    await _send_frames(scope, send, read, silence, limits)


async def _send_frames(
    scope: Scope,
    send: Send,
    read: Callable[[Outbox[bytes]], Coroutine[Any, Any, None]],
    encoder: KeepAlive,
    limits: Limits,
) -> None:
    """Write what `read` puts into its outbox, until it closes it."""
    totals = scope["state"]["outboxes"]
    outbox: Outbox[bytes] = Outbox(limits.outbox_frames, limits.outbox_bytes, totals)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    try:
        async with anyio.create_task_group() as probing:
            probing.start_soon(_probe, scope, outbox, encoder)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, outbox)
                await _write(send, outbox, encoder, limits.keep_alive_s)
            probing.cancel_scope.cancel()
    finally:
        outbox.discard()
    await send({"type": "http.response.body", "body": b""})


async def _write(
    send: Send, outbox: Outbox[bytes], encoder: KeepAlive, keep_alive_s: float
) -> None:
    while True:
        frames = [encoder.keep_alive()]
        with anyio.move_on_after(keep_alive_s):
            frames = await outbox.take()
        if not frames:
            return
        await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})


async def _probe(scope: Scope, outbox: Outbox[bytes], encoder: KeepAlive) -> None:
    """When the client has closed its side, find out whether it still reads.

    A half-closed and a closed connection look the same until something is written: a closed one
    answers the first write with a reset, which the second one meets.
    """
    peer = scope.get("extensions", {}).get(HALF_CLOSE)
    if peer is None:
        return
    await peer["event"].wait()
    with suppress(OutboxClosed):
        for _ in range(2):
            await outbox.put(encoder.keep_alive())
            await anyio.sleep(PROBE_PAUSE_S)

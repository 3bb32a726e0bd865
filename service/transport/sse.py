"""Server-sent events: one generation's events to one client, at the client's pace."""

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Protocol

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


class StreamEncoder(Protocol):
    """What a dialect makes of events: whole SSE frames."""

    def encode(self, event: Event) -> bytes: ...

    def keep_alive(self) -> bytes: ...


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
    outbox: Outbox[bytes] = Outbox(limits.outbox_frames, limits.outbox_bytes)

    async def read() -> None:
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

    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    async with anyio.create_task_group() as probing:
        probing.start_soon(_probe, scope, outbox, encoder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await _write(send, outbox, encoder, limits.keep_alive_s)
        probing.cancel_scope.cancel()
    await send({"type": "http.response.body", "body": b""})


async def _write(
    send: Send, outbox: Outbox[bytes], encoder: StreamEncoder, keep_alive_s: float
) -> None:
    while True:
        frames = [encoder.keep_alive()]
        with anyio.move_on_after(keep_alive_s):
            frames = await outbox.take()
        if not frames:
            return
        await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})


async def _probe(scope: Scope, outbox: Outbox[bytes], encoder: StreamEncoder) -> None:
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

"""Reads server-sent events (WHATWG HTML, section 9.2) at the pace of the socket."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import aiohttp

from loadtest.measure.sample import Sample
from loadtest.transports.base import (
    StallWatch,
    Target,
    post,
    told,
)


@dataclass(slots=True)
class SseParser:
    """Events of a byte stream, however it was cut. Only `data` matters to every dialect here:
    each repeats the event's name inside."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is now complete; comments and other fields give none."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            held = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n")
            body = data[:-1].replace(b"\r", b"\n") if held else data.replace(b"\r", b"\n")
            data = body + b"\r" if held else body
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                yield event[5:].removeprefix(b" ")
                continue
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                yield b"\n".join(lines)


async def stream_events(
    http: aiohttp.ClientSession,
    target: Target,
    path: str,
    body: bytes,
    sample: Sample,
    on_event: Callable[[bytes, float], bool],
) -> None:
    """POST `body` and give each event's data and the time it came off the socket to `on_event`
    until that returns True (the end) or the stream ends. Raises RequestError.

    All events that came in one read have its time: what the client needs to parse them is no
    latency of the server. Only text is a sign of life: keep-alives may go on for ever.
    """
    parser = SseParser()
    sample.begin(len(body))
    try:
        async with (
            StallWatch(target.stall_s) as watch,
            await post(http, target, path, body) as response,
        ):
            async for data in response.content.iter_any():
                now_s = time.perf_counter()
                sample.bytes_down += len(data)
                for event in parser.feed(data):
                    num_pieces = len(sample.pieces)
                    if on_event(event, now_s):
                        await response.read()
                        return
                    if len(sample.pieces) > num_pieces:
                        watch.alive()
    except (aiohttp.ClientError, OSError) as error:
        raise told(error) from error

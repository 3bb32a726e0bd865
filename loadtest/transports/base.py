"""What a transport is: it sends one turn and notes what comes back, when."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec

from loadtest.measure.sample import Kind, RequestError, Sample, of_status

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. `url` is its root, without /v1; `model` as it lists it.

    `extra` is merged into each request's body, a null takes a key away. `key` goes out as a
    bearer token. `stall_s` without any text ends a request as stalled.
    """

    name: str
    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    stall_s: float = 120.0

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def body(self, fields: dict[str, Any]) -> bytes:
        """The body of a request: `fields` with `extra` merged in."""
        merged = {**fields, **self.extra}
        return msgspec.json.encode({key: v for key, v in merged.items() if v is not None})


@dataclass(slots=True)
class Dialogue:
    """A conversation as it grows: user texts and answers in turn, starting with a user text.

    `response_id` is the server's name for the state after the last answer. `lane` is what a
    transport with connections of its own keeps for this dialogue.
    """

    session: str
    system: str
    tools: Sequence[dict[str, Any]]
    texts: list[str] = field(default_factory=list)
    response_id: str | None = None
    lane: object = None

    def fork(self, session: str) -> "Dialogue":
        """The same past under another name, on a lane of its own."""
        return Dialogue(session, self.system, self.tools, list(self.texts), self.response_id)

    def num_bytes(self) -> int:
        """Of the whole conversation's text."""
        texts = [self.system, str(self.tools), *self.texts]
        return sum(len(text.encode()) for text in texts)

    def messages(self) -> list[dict[str, Any]]:
        """`{role, content}` of each text; the system prompt isn't among them."""
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.texts)]


class Transport(Protocol):
    """One way to talk to a target. Any number of `send` may run side by side."""

    async def send(self, dialogue: Dialogue, sample: Sample) -> None:
        """Ask for the answer to the dialogue's last text and note it in `sample`, as it comes.

        Raises RequestError for what went wrong; what came before stays in `sample`. When
        cancelled, the request's connection or lane is given up.
        """

    async def leave(self, dialogue: Dialogue) -> None:
        """The dialogue is over; its lane may go to another."""

    async def close(self) -> None:
        """Close all connections."""


class StallWatch:
    """Ends a request when no text came for `limit_s`: `async with` around it, `alive()` at each.

    Raises RequestError from the block's end. Cheap: the deadline moves at most eight times per
    limit, so a stall is noticed between 7/8 and the whole of it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(limit_s)
        self._moved_s = self._loop.time()

    async def __aenter__(self) -> "StallWatch":
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._timeout.__aexit__(*exc)
        except TimeoutError:
            raise RequestError(
                Kind.STALLED, f"no text came for {self._limit_s:g} s; the request was given up"
            ) from None

    def alive(self) -> None:
        """Something came."""
        now_s = self._loop.time()
        if now_s - self._moved_s > self._limit_s / 8:
            self._moved_s = now_s
            self._timeout.reschedule(now_s + self._limit_s)


@dataclass(slots=True)
class _Way:
    """Whether a request went over a connection that an earlier one had opened."""

    kept: bool = False


async def _note_kept(session: aiohttp.ClientSession, context: Any, params: object) -> None:
    if isinstance(context.trace_request_ctx, _Way):
        context.trace_request_ctx.kept = True


def open_http(target: Target) -> aiohttp.ClientSession:
    """As many connections as there are requests, none limited, each kept for the next.

    Compression is off (it would hide bytes), and so are the library's own timeouts: a StallWatch
    knows better than a total.
    """
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_kept)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        headers={**target.headers, "Accept-Encoding": "identity"},
        read_bufsize=1 << 18,
        trace_configs=[trace],
    )


async def post(
    http: aiohttp.ClientSession, target: Target, path: str, body: bytes
) -> aiohttp.ClientResponse:
    """The response's head; its body is still to be read.

    A kept connection that the server closed at that moment is no failure of the request: it is
    sent again, on another. Raises RequestError for a status that isn't a success, and what the
    library raises for the rest.
    """
    while True:
        way = _Way()
        try:
            response = await http.post(
                target.url + path, data=body, headers=JSON, trace_request_ctx=way
            )
            break
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not way.kept:
                raise
    try:
        return await checked(response)
    except RequestError:
        response.release()
        raise


async def checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """The response, or the RequestError of its status."""
    if response.status >= 300:
        body = (await response.content.read(4096)).decode(errors="replace")
        retry = response.headers.get("retry-after-ms") or response.headers.get("retry-after")
        raise of_status(response.status, body + (f" (retry after {retry})" if retry else ""))
    return response


def told(error: aiohttp.ClientError | OSError) -> RequestError:
    """A library's error in our words: no connection, or one that broke."""
    kind = Kind.CUT
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        kind = Kind.CONNECT
    return RequestError(kind, f"{type(error).__name__}: {error}"[:300])

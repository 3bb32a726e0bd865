"""What every HTTP endpoint needs: bodies within bounds, answers, and the client that goes away."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.config import Limits
from service.dialects import wire
from service.errors import ApiError, openai_error
from service.events import RequestRecord

T = TypeVar("T")

HALF_CLOSE = "headwater.half_close"
"""The ASGI extension that tells when the client closed its sending side (`protocol.py`)."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {limit} bytes, which is the most this server takes.",
        code="request_too_large",
    )


def _compressed(encoding: str) -> ApiError:
    return ApiError(
        415,
        f"Bodies with content-encoding {encoding[:64]!r} are not read: send it uncompressed.",
        code="unsupported_content_encoding",
        headers={"accept-encoding": "identity"},
    )


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The whole body. Raises ApiError 415 for one that is compressed; 413 as soon as it is known
    to be too large, before it is read where the client told its length; ClientGone if the client
    leaves meanwhile."""
    limit = limits.body_bytes
    headers = Headers(scope=scope)
    if (encoding := headers.get("content-encoding", "identity").strip()).lower() != "identity":
        raise _compressed(encoding)
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def decode_body(body: bytes, decode: Callable[[bytes], T], limits: Limits) -> T:
    """`decode(body)`: here where it is short, else on a worker thread, so that the event loop
    keeps serving the others."""
    if len(body) <= limits.offload_bytes:
        return decode(body)

    def decode_large() -> T:
        wire.require_few_values(body)
        return decode(body)

    return await anyio.to_thread.run_sync(decode_large)


async def read_decoded(
    scope: Scope, receive: Receive, decode: Callable[[bytes], T], limits: Limits
) -> T:
    """The body as what it says. Raises as `read_body` and `decode` do."""
    return await decode_body(await read_body(scope, receive, limits), decode, limits)


async def send_answer(
    send: Send,
    status: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    content_type: str = "application/json",
) -> None:
    """A whole answer."""
    fields = {"content-length": str(len(body)), **(headers or {})}
    if body:
        fields["content-type"] = content_type
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, status: int = 200) -> None:
    """A whole JSON answer."""
    await send_answer(send, status, msgspec.json.encode(value))


async def send_error(send: Send, error: ApiError) -> None:
    """A refusal in OpenAI's shape."""
    await send_answer(send, error.status, openai_error(error), error.headers)


def begin_record(
    scope: Scope, *, operation: str, model: str, start_ns: int, stream: bool
) -> RequestRecord:
    """The record of a request that was read and decoded until now, with the trace context that
    its headers carry."""
    headers = Headers(scope=scope)
    record = RequestRecord(
        operation=operation,
        model=model,
        start_ns=start_ns,
        request_id=scope["state"]["request_id"],
        path=scope["path"],
        tenant=scope["state"]["tenant"],
        stream=stream,
        traceparent=headers.get("traceparent"),
        tracestate=headers.get("tracestate"),
        trace_number=scope["state"]["trace_number"],
    )
    record.stamp("receive")
    return record


async def while_connected(
    receive: Receive,
    work: Callable[[], Awaitable[None]],
    records: Sequence[RequestRecord] = (),
) -> None:
    """Run `work`, which is cancelled when the client disconnects.

    The moment is stamped into those of `records` (more may be added meanwhile) that have not
    ended. The body must have been read: what else the client sends is not. Raises what `work`
    raises, as it is, and ClientGone where it was cancelled.
    """
    failure: Exception | None = None
    done = False

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for record in records:
            if not record.end_ns:
                record.disconnected_ns = time.monotonic_ns()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await work()
        except Exception as error:
            failure = error
        done = True
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not done:
        raise ClientGone

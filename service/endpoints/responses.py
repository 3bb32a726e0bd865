"""The Responses API over HTTP: create, look at, follow, cancel, delete, list, count."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine.types import unpack_tokens
from service.dialects import wire
from service.dialects.fields import INT64
from service.dialects.responses_decode import (
    CreateRequest,
    TokenCountBody,
    decode_create,
    in_this_dialect,
)
from service.endpoints.generating import Call, Generates
from service.errors import ApiError, from_failure, invalid
from service.events import Event, Failed, RequestRecord
from service.responses.listing import MAX_PAGE, Order, input_items, page
from service.responses.store import StoredResponse
from service.responses.turns import Origin, Turn
from service.services import Services
from service.transport.http import (
    read_body,
    read_decoded,
    send_answer,
    send_json,
    while_connected,
)
from service.transport.sse import send_events, send_frames

KEEP_ALIVE: Final = b": keep-alive\n\n"
MAX_PARAMETERS: Final = 64

_TYPE_AT: Final = len('{"type":"')

Query = TypeVar("Query")


class RetrieveQuery(msgspec.Struct, frozen=True):
    stream: bool | None = None
    starting_after: Annotated[int, Meta(ge=0, le=INT64)] | None = None


class ListQuery(msgspec.Struct, frozen=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    order: Order = "desc"


class CreateResponse(Generates[CreateRequest]):
    """`POST /v1/responses`: JSON, events, or a response that runs by itself."""

    def _decode(self, body: bytes) -> CreateRequest:
        """Raises ApiError, also for a response in the background that nobody could ever see."""
        request = decode_create(body, self._services.card)
        if request.body.background and request.body.store is False:
            raise invalid("background", "A background response must be stored: leave out 'store'.")
        return request

    async def _answer(self, call: Call, request: CreateRequest) -> None:
        scope, body = call.scope, request.body
        origin = Origin(
            request_id=scope["state"]["request_id"],
            tenant=scope["state"]["tenant"],
            headers=Headers(scope=scope),
            arrived_ns=call.start_ns,
            received_ns=time.monotonic_ns(),
            streamed=body.stream is True,
            trace_number=scope["state"]["trace_number"],
        )
        answer = self._detached if body.background else self._attached
        try:
            await answer(call, request, origin)
        except ApiError as error:
            raise in_this_dialect(error) from error

    async def _detached(self, call: Call, request: CreateRequest, origin: Origin) -> None:
        scope, send = call.scope, call.send

        async def answer() -> None:
            stored = await self._services.responses.start(request, origin)
            if request.body.stream:
                await _follow(scope, send, stored, -1, self._services)
            else:
                await send_answer(send, 200, await self._services.responses.describe(stored))

        await while_connected(call.receive, answer)

    async def _attached(self, call: Call, request: CreateRequest, origin: Origin) -> None:
        scope, send = call.scope, call.send
        records: list[RequestRecord] = []

        async def answer() -> None:
            async with self._services.responses.run(request, origin) as turn:
                records.append(turn.record)
                first = await anext(turn.events)
                if request.body.stream:
                    limits = self._services.settings.limits
                    encoder, record = _Stream(turn), turn.record
                    await send_events(scope, send, first, turn.events, encoder, record, limits)
                else:
                    await self._answer_whole(send, turn, first)
            records.clear()

        await while_connected(call.receive, answer, records)

    async def _answer_whole(self, send: Send, turn: Turn, first: Event) -> None:
        """A response whose object was not delivered is forgotten: nobody knows its id."""
        delivered = False
        try:
            turn.take(first)
            async for event in turn.events:
                turn.take(event)
                if isinstance(event, Failed):
                    raise from_failure(event)
            await send_answer(send, 200, turn.encoder.response)
            delivered = True
        finally:
            if not delivered:
                self._services.responses.forget(turn.stored)


class _Stream:
    """The events of a turn as SSE frames."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def encode(self, event: Event) -> bytes:
        return b"".join(map(_sse_frame, self._turn.take(event)))

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE


class _Silence:
    def keep_alive(self) -> bytes:
        return KEEP_ALIVE


class RetrieveResponse:
    """`GET /v1/responses/{id}`: the object, or its events from a number on."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 400 and 404; ClientGone if the client left."""
        query = _query(scope, RetrieveQuery)
        stored = self._services.responses.find(*_named(scope))
        after = -1 if query.starting_after is None else query.starting_after

        async def answer() -> None:
            if query.stream:
                await _follow(scope, send, stored, after, self._services)
            else:
                await send_answer(send, 200, await self._services.responses.describe(stored))

        await while_connected(receive, answer)


class DeleteResponse:
    """`DELETE /v1/responses/{id}`; what continues the response keeps what it read of it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 404."""
        stored = self._services.responses.find(*_named(scope))
        self._services.responses.forget(stored)
        await send_json(send, {"id": stored.id, "object": "response", "deleted": True})


class CancelResponse:
    """`POST /v1/responses/{id}/cancel`: ends a background response by the engine's next step."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 400 for a response in the foreground, 404 for an unknown one."""
        responses = self._services.responses
        await read_body(scope, receive, self._services.settings.limits)
        stored = responses.find(*_named(scope))

        async def answer() -> None:
            await responses.cancel(stored)
            await send_answer(send, 200, await responses.describe(stored))

        await while_connected(receive, answer)


class InputItems:
    """`GET /v1/responses/{id}/input_items`: what the response read, page by page."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 400 and 404."""
        query = _query(scope, ListQuery)
        stored = self._services.responses.find(*_named(scope))
        await send_json(send, page(input_items(stored), query.after, query.limit, query.order))


class InputTokens:
    """`POST /v1/responses/input_tokens`: how many tokens the same create would read."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError; ClientGone if the client left."""
        services = self._services
        decode = partial(decode_create, card=services.card, kind=TokenCountBody)
        request = await read_decoded(scope, receive, decode, services.settings.limits)
        previous = services.responses.previous(
            scope["state"]["tenant"], request.body.previous_response_id
        )
        chain = request.input if previous is None else previous.following(request.input)
        former = None if previous is None else unpack_tokens(previous.tokens())

        async def answer() -> None:
            prompt = await services.renderer.render(request.conversation(chain), former)
            counted = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
            await send_json(send, counted)

        try:
            await while_connected(receive, answer)
        except ApiError as error:
            raise in_this_dialect(error) from error


async def _follow(
    scope: Scope, send: Send, stored: StoredResponse, after: int, services: Services
) -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        async with aclosing(services.responses.replay(stored, after)) as told:
            async for some in told:
                yield b"".join(map(_sse_frame, some))

    async with aclosing(frames()) as sent:
        await send_frames(scope, send, sent, _Silence(), services.settings.limits)


def _sse_frame(frame: bytes) -> bytes:
    type = frame[_TYPE_AT : frame.index(b'"', _TYPE_AT)]
    return b"event: %b\ndata: %b\n\n" % (type, wire.one_line(frame))


def _named(scope: Scope) -> tuple[str, str]:
    """Whose response the path names, and which."""
    return scope["state"]["tenant"], scope["path_params"]["id"]


def _query(scope: Scope, kind: type[Query]) -> Query:
    """The query string as a `kind`; parameters it does not name are ignored.

    Raises ApiError 400 with the parameter that is wrong.
    """
    try:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise ApiError(400, "The query string has too many parameters.") from None
    return wire.convert(dict(pairs), kind)

"""`POST /v1/chat/completions`: decode, generate, encode."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from service.dialects import chat_decode
from service.dialects.chat_decode import ChatRequest
from service.dialects.chat_encode import ChatStream, encode_answer
from service.errors import from_failure
from service.events import Completed, Event, Failed, RequestRecord, TextDelta, TokenText
from service.services import Services
from service.transport.http import decode_body, read_body, send_answer, while_connected
from service.transport.sse import send_events


class ChatCompletions:
    """The endpoint, as an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing has been answered; ClientGone if the client left."""
        start_ns = time.monotonic_ns()
        services = self._services
        limits = services.settings.limits
        body = await read_body(scope, receive, limits)
        decode = partial(chat_decode.decode, card=services.card)
        request = await decode_body(body, decode, limits)
        del body
        record = _record(scope, request, start_ns)

        def gone() -> None:
            if not record.end_ns:
                record.disconnected_ns = time.monotonic_ns()

        async def answer() -> None:
            async with aclosing(services.generator.run(request.generation, record)) as events:
                first = await anext(events)
                if request.stream:
                    encoder = ChatStream(request, services.card, services.assets.vocabulary)
                    await send_events(scope, send, first, events, encoder, record, limits)
                else:
                    await self._answer_whole(send, request, events)

        await while_connected(receive, answer, gone)

    async def _answer_whole(
        self, send: Send, request: ChatRequest, events: AsyncGenerator[Event, None]
    ) -> None:
        pieces: list[str] = []
        tokens: list[TokenText] = []
        end: Completed | None = None
        async for event in events:
            match event:
                case TextDelta():
                    pieces.append(event.text)
                    tokens += event.tokens
                case Failed():
                    raise from_failure(event)
                case Completed():
                    end = event
        assert end is not None  # the path's contract: exactly one terminal event
        services = self._services
        encode = partial(
            encode_answer,
            *(request, "".join(pieces), tokens, end),
            *(services.card, services.assets.vocabulary),
        )
        # Log-probabilities of a long answer are hundreds of thousands of objects.
        body = await to_thread.run_sync(encode) if tokens else encode()
        await send_answer(send, 200, body)


def _record(scope: Scope, request: ChatRequest, start_ns: int) -> RequestRecord:
    headers = Headers(scope=scope)
    return RequestRecord(
        operation="chat",
        model=request.generation.model,
        start_ns=start_ns,
        request_id=scope["state"]["request_id"],
        stream=request.stream,
        traceparent=headers.get("traceparent"),
        tracestate=headers.get("tracestate"),
    )

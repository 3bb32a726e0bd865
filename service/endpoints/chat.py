"""`POST /v1/chat/completions`: decode, generate, encode."""

import secrets
import time
from contextlib import AsyncExitStack
from functools import partial

from anyio import to_thread
from starlette.types import Receive, Scope, Send

from service.choices import begin, begin_copies, gather
from service.dialects import chat_decode
from service.dialects.chat_decode import ChatRequest
from service.dialects.chat_encode import ChatStream, encode_answer
from service.events import RequestRecord
from service.services import Services
from service.telemetry.sinks import all_finished
from service.transport.http import (
    begin_record,
    read_request,
    send_answer,
    while_connected,
)
from service.transport.sse import send_choices


class ChatCompletions:
    """The endpoint, as an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing has been answered; ClientGone if the client left."""
        start_ns = time.monotonic_ns()
        services = self._services
        limits = services.settings.limits
        request = await read_request(
            scope,
            receive,
            partial(chat_decode.decode, card=services.card),
            limits,
            services.records,
            operation="chat",
            start_ns=start_ns,
        )
        group = secrets.token_hex(8)
        records = [_record(scope, request, start_ns, group, n) for n in range(request.n)]

        async def answer() -> None:
            with all_finished(services.records, records):
                async with AsyncExitStack() as stack:
                    await self._answer(scope, send, request, records, stack)

        await while_connected(receive, answer, records)

    async def _answer(
        self,
        scope: Scope,
        send: Send,
        request: ChatRequest,
        records: list[RequestRecord],
        stack: AsyncExitStack,
    ) -> None:
        """One generation for each record, all of one prompt."""
        services = self._services
        generator, wanted = services.generator, request.generation
        admitted, events = await begin(stack, generator.run(wanted, records[0]))
        first, choices = await begin_copies(stack, generator, wanted, admitted, records[1:])
        first, choices = [admitted, *first], [events, *choices]
        if request.stream:
            encoder = ChatStream(request, services.card, services.assets.vocabulary)
            limits = services.settings.limits
            await send_choices(scope, send, first, choices, encoder, records, limits)
            return
        joined = await gather(choices)
        encode = partial(
            encode_answer,
            *(request, admitted.token_ids, joined),
            *(services.card, services.assets.vocabulary),
        )
        # Log-probabilities of a long answer are hundreds of thousands of objects.
        many = any(choice.answer.tokens or choice.scored for choice in joined)
        body = await to_thread.run_sync(encode) if many else encode()
        await send_answer(send, 200, body)


def _record(
    scope: Scope, request: ChatRequest, start_ns: int, group: str, choice: int
) -> RequestRecord:
    record = begin_record(
        scope,
        operation="chat",
        model=request.generation.model,
        start_ns=start_ns,
        stream=request.stream,
    )
    record.choice, record.group = choice, group
    record.num_choices = record.num_per_prompt = request.n
    return record

"""`POST /v1/chat/completions`: decode, generate, encode."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from starlette.types import Receive, Scope, Send

from service.choices import Choice, begin, begin_copies
from service.dialects import chat_decode
from service.dialects.chat_decode import ChatRequest
from service.dialects.chat_encode import ChatStream, encode_answer
from service.endpoints.side_by_side import Begun, Dialect, answer_choices, choice_records
from service.events import RequestRecord
from service.services import Services
from service.transport.http import read_request


class ChatCompletions:
    """The endpoint, as an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError while nothing has been answered; ClientGone if the client left."""
        start_ns = time.monotonic_ns()
        services = self._services
        request = await read_request(
            scope,
            receive,
            partial(chat_decode.decode, card=services.card),
            services.settings.limits,
            services.records,
            operation="chat",
            start_ns=start_ns,
        )
        records = choice_records(
            scope,
            operation="chat",
            model=request.generation.model,
            start_ns=start_ns,
            stream=request.stream,
            num_prompts=1,
            num_per_prompt=request.n,
        )
        begin_all = partial(self._begin, request, records)
        await answer_choices(scope, receive, send, services, records, begin_all)

    async def _begin(
        self, request: ChatRequest, records: Sequence[RequestRecord], stack: AsyncExitStack
    ) -> tuple[Begun, Dialect]:
        """One generation for each record, all of one prompt."""
        services = self._services
        generator, wanted = services.generator, request.generation
        admitted, events = await begin(stack, generator.run(wanted, records[0]))
        first, choices = await begin_copies(stack, generator, wanted, admitted, records[1:])
        served = services.card, services.assets.vocabulary

        def whole(joined: Sequence[Choice]) -> bytes:
            return encode_answer(request, admitted.token_ids, joined, *served)

        stream = partial(ChatStream, request, *served) if request.stream else None
        return Begun([admitted, *first], [events, *choices]), Dialect(stream, whole)

"""`POST /v1/chat/completions`: decode, generate, encode."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from service.choices import Choice, begin, begin_copies
from service.dialects import chat_decode
from service.dialects.chat_decode import ChatRequest
from service.dialects.chat_encode import ChatStream, encode_answer
from service.endpoints.generating import Call, Generates
from service.endpoints.side_by_side import Begun, Dialect, answer_choices, choice_records
from service.events import RequestRecord


class ChatCompletions(Generates[ChatRequest]):
    """The endpoint."""

    def _decode(self, body: bytes) -> ChatRequest:
        return chat_decode.decode(body, self._services.card)

    async def _answer(self, call: Call, request: ChatRequest) -> None:
        model, stream = request.generation.model, request.stream
        records = choice_records(call, model, stream=stream, num_prompts=1, num_each=request.n)
        begin_all = partial(self._begin, request, records)
        await answer_choices(call, self._services, records, begin_all)

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

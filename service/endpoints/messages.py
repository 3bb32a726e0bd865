"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's dialect."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine.types import unpack_tokens
from service.cache.diagnosis import Fingerprint, Fingerprints, diagnose, fingerprint
from service.conversation import Conversation
from service.dialects import messages_decode
from service.dialects.messages_decode import MessagesRequest
from service.dialects.messages_encode import MessageStream, WholeMessage
from service.endpoints.generating import Call, Generates
from service.errors import from_failure
from service.events import Admitted, Completed, Event, Failed
from service.services import Services
from service.transport.http import read_decoded, send_answer, send_json, while_connected
from service.transport.sse import send_events

PATH = "/v1/messages"
SESSION_HEADER = "x-claude-code-session-id"
"""Names the session of an agent: used to tell traces of it together, never to allow anything."""


class Messages(Generates[MessagesRequest]):
    """The endpoint of answers."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._fingerprints = Fingerprints()

    def _decode(self, body: bytes) -> MessagesRequest:
        return messages_decode.decode(body, self._services.card)

    async def _answer(self, call: Call, request: MessagesRequest) -> None:
        services, scope, send = self._services, call.scope, call.send
        limits = services.settings.limits
        record = call.record(request.generation.model, stream=request.stream)
        record.conversation_id = Headers(scope=scope).get(SESSION_HEADER)

        async def answer() -> None:
            async with aclosing(services.generator.run(request.generation, record)) as events:
                first = await anext(events)
                assert isinstance(first, Admitted)  # the path's contract
                first = self._diagnosed(first, request, record.tenant)
                if request.stream:
                    kept, request_id = first.kept, record.request_id
                    encoder = MessageStream(request, services.card, kept, request_id)
                    await send_events(scope, send, first, events, encoder, record, limits)
                else:
                    whole = WholeMessage(request, services.card, first)
                    await _answer_whole(send, whole, events)

        await while_connected(call.receive, answer, [record])

    def _diagnosed(self, admitted: Admitted, request: MessagesRequest, tenant: str) -> Admitted:
        """Compare the prompt with an earlier one, and keep it to be compared with, where the
        client asks for that."""
        asked = request.diagnostics
        if asked is None:
            return admitted
        current = _fingerprint(request.generation.conversation, admitted.token_ids)
        self._fingerprints.add(tenant, request.generation.id, current)
        if asked.previous_message_id is None:
            return admitted
        former = self._fingerprints.get(tenant, asked.previous_message_id)
        num_required = 0 if former is None else len(unpack_tokens(former.token_ids))
        return replace(admitted, diagnosis=diagnose(former, current, num_required))


def _fingerprint(conversation: Conversation, token_ids: bytes) -> Fingerprint:
    system = [each.text for each in conversation.messages if each.role == "system"]
    tools = [tool.spec for tool in conversation.tools]
    return fingerprint(token_ids, "", tools, system)


async def _answer_whole(
    send: Send, whole: WholeMessage, events: AsyncGenerator[Event, None]
) -> None:
    async for event in events:
        match event:
            case Failed():
                raise from_failure(event)
            case Completed():
                await send_answer(send, 200, whole.encode(event))
            case _:
                whole.add(event)


class CountTokens:
    """How many tokens the same prompt has as a call of `Messages`: the sum of its usage."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError; ClientGone if the client left."""
        services = self._services
        decode = partial(messages_decode.decode_prompt, card=services.card)
        conversation = await read_decoded(scope, receive, decode, services.settings.limits)

        async def answer() -> None:
            prompt = await services.renderer.render(conversation)
            await send_json(send, {"input_tokens": len(prompt.token_ids)})

        await while_connected(receive, answer)

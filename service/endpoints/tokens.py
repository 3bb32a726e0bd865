"""`POST /tokenize` and `POST /detokenize`, with vLLM's fields."""

from functools import partial
from typing import Annotated, Final

import msgspec
import numpy as np
from anyio import to_thread
from msgspec import Meta
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from service.dialects import wire
from service.dialects.chat_decode import ChatBody
from service.dialects.chat_messages import INSIDE_PROMPT, Prompt, decode_conversation
from service.dialects.fields import Name
from service.dialects.known_fields import KnownFields
from service.dialects.sampling import SHARED_HARMLESS, SamplingBody
from service.errors import invalid
from service.services import Services
from service.transport.http import read_decoded, send_json, while_connected

MAX_CHARACTERS: Final = 1 << 20
MAX_TOKENS: Final = 1 << 20
IDS_AT_ONCE: Final = 16_384


class TokenizeBody(Prompt, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: Name | None = None
    prompt: Annotated[str, Meta(max_length=MAX_CHARACTERS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


_FIELDS: Final = KnownFields.of(
    TokenizeBody,
    ChatBody,
    SamplingBody,
    harmless=f"{SHARED_HARMLESS} return_token_strs",
    system="messages",
    inside=INSIDE_PROMPT,
)


def _decode(data: bytes) -> TokenizeBody:
    _FIELDS.check(data)
    return wire.decode(data, TokenizeBody)


class DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: Annotated[list[int], Meta(max_length=MAX_TOKENS)]
    model: Name | None = None


class Tokenize:
    """A text, or a conversation as it would be rendered, as token ids."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._services.settings.limits
        body = await read_decoded(scope, receive, _decode, limits)
        if body.model is not None:
            self._services.card.require(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "Give either 'prompt' or 'messages'.")

        async def answer() -> None:
            token_ids = await self._token_ids(body)
            max_context = self._services.card.max_context
            tokens = await to_thread.run_sync(_encode, token_ids)
            fields = {"count": len(token_ids), "max_model_len": max_context, "tokens": tokens}
            await send_json(send, fields)

        await while_connected(receive, answer)

    async def _token_ids(self, body: TokenizeBody) -> NDArray[np.int32]:
        renderer = self._services.renderer
        if body.prompt is not None:
            add_special = body.add_special_tokens is not False
            return await renderer.tokenize(body.prompt, add_special)
        if body.add_generation_prompt is False and not body.continue_final_message:
            raise wire.unsupported_value("add_generation_prompt")
        return (await renderer.render(decode_conversation(body))).token_ids


def _encode(token_ids: NDArray[np.int32]) -> msgspec.Raw:
    """The ids as JSON, made in pieces, so that no call holds the interpreter for long."""
    starts = range(0, len(token_ids), IDS_AT_ONCE)
    pieces = (token_ids[start : start + IDS_AT_ONCE].tolist() for start in starts)
    inner = b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces)
    return msgspec.Raw(b"[" + inner + b"]")


class Detokenize:
    """Token ids as text, special tokens included."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._services.settings.limits
        decode = partial(wire.decode, kind=DetokenizeBody)
        body = await read_decoded(scope, receive, decode, limits)
        if body.model is not None:
            self._services.card.require(body.model)

        async def answer() -> None:
            await send_json(send, {"prompt": await self._services.renderer.detokenize(body.tokens)})

        await while_connected(receive, answer)

"""OpenAI Chat Completions, the request: a body's bytes to a GenerationRequest."""

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from engine.types import MAX_TOP_LOGPROBS
from service.conversation import GenerationOptions, GenerationRequest
from service.dialects import wire
from service.dialects.chat_messages import Kind, Prompt, decode_conversation
from service.dialects.fields import (
    INT32,
    INT64,
    CacheSalt,
    MinP,
    Name,
    Priority,
    Seed,
    Stops,
    StopTokens,
    Temperature,
    Timeout,
    TokenCount,
    TopK,
    TopP,
)
from service.errors import invalid
from service.model_card import ModelCard

MAX_BIASES: Final = 1_024

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Kind


class ChatBody(Prompt, frozen=True, kw_only=True):
    """The wire's body; what is `Any` is refused where it is set."""

    model: Name
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    timeout: Timeout | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    modalities: Annotated[list[str], Meta(max_length=8)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    functions: Any = None
    audio: Any = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A decoded call: what to generate, and how to show it."""

    generation: GenerationRequest
    stream: bool
    include_usage: bool


_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "functions": ([],),
    "audio": (),
    "tool_choice": ("none", "auto"),
}


def decode(body: bytes, card: ModelCard) -> ChatRequest:
    """The request in a body.

    Raises ApiError: 400 with the path of the field that is wrong, 404 for an unknown model.
    """
    wire_body = wire.decode(body, ChatBody)
    card.require(wire_body.model)
    _refuse_unsupported(wire_body, card)
    streaming = wire_body.stream_options
    return ChatRequest(
        generation=GenerationRequest(
            id=f"chatcmpl-{secrets.token_hex(16)}",
            model=card.id,
            conversation=decode_conversation(wire_body),
            options=_options(wire_body, card),
        ),
        stream=wire_body.stream is True,
        include_usage=streaming is not None and streaming.include_usage is True,
    )


def _refuse_unsupported(body: ChatBody, card: ModelCard) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise wire.unsupported_value(name)
    if body.response_format is not None and body.response_format.type != "text":
        raise wire.unsupported_value("response_format.type")
    for key, bias in (body.logit_bias or {}).items():
        _require_token_id(int(key) if key.isdecimal() and len(key) < 12 else -1, "logit_bias", card)
        if bias:
            raise wire.unsupported_value("logit_bias")


def _require_token_id(token_id: int, param: str, card: ModelCard) -> None:
    if not 0 <= token_id < card.vocab_size:
        raise invalid(
            param, f"Invalid '{param}': token ids are 0 to {card.vocab_size - 1} in this model."
        )


def _options(body: ChatBody, card: ModelCard) -> GenerationOptions:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    for index, token_id in enumerate(body.stop_token_ids or ()):
        _require_token_id(token_id, f"stop_token_ids[{index}]", card)
    stop = body.stop or ()
    return GenerationOptions(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else min(max(body.top_k, 0), card.vocab_size),
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed & INT64,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        priority=body.priority or 0,
        timeout_s=body.timeout,
        salt=body.cache_salt or "",
    )

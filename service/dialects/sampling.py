"""Fields that Chat Completions and Completions share: how to generate, and how much to show.

Accepted without effect, as none of them changes an answer here: `known_fields.COMMON` (every prefix
is cached, for as long as there is room), `SHARED_HARMLESS`, `stream_options.include_obfuscation`.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from engine.types import MAX_BIASES, MAX_TOP_LOGPROBS
from service.conversation import GenerationOptions
from service.dialects import wire
from service.dialects.common import (
    CommonBody,
    common_options,
    require_token_id,
    require_token_ids,
)
from service.dialects.fields import kept_seconds
from service.dialects.known_fields import CACHE_OPTIONS, KnownFields
from service.errors import invalid
from service.model_card import ModelCard

MAX_N: Final = 16
SHARED_HARMLESS: Final = (
    "moderation add_special_tokens truncation_side no_stop_trim "
    "separate_reasoning stream_reasoning return_meta_info return_prompt_token_ids "
    "return_token_offsets return_prompt_text return_cached_tokens_details"
)

NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority", "fast"]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


INSIDE_SAMPLING: Final = {
    "stream_options": KnownFields.within(
        StreamOptions, harmless="include_obfuscation continuous_usage_stats"
    ),
    "prompt_cache_options": CACHE_OPTIONS,
}


class SamplingBody(CommonBody, frozen=True, kw_only=True):
    """The shared part of a body; what is `Any` is refused where it asks for anything."""

    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=MAX_BIASES)] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    stop_regex: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    return_tokens_as_token_ids: Any = None
    lora_path: Any = None


_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "stop_regex": ([], ""),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "lora_path": (),
}
_TIERS: Final[dict[ServiceTier, tuple[str, int]]] = {
    "auto": ("default", 0),
    "default": ("default", 0),
    "scale": ("default", 0),
    "flex": ("flex", 1),
    "priority": ("priority", -1),
    "fast": ("priority", -1),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """`options` of each choice, and how the answer is shown. `service_tier` is the one that was
    used, where the body named one; an explicit `priority` goes before it."""

    options: GenerationOptions
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    service_tier: str | None


def decode_sampling(
    data: bytes, card: ModelCard, *, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """The shared fields of a body. Raises ApiError 400 with the field that is wrong."""
    body = wire.decode(data, SamplingBody)
    _check(body, card)
    streaming = body.stream_options
    return Sampling(
        options=_options(body, card, max_tokens, logprobs),
        n=body.n or 1,
        stream=body.stream is True,
        include_usage=streaming is not None and streaming.include_usage is True,
        return_token_ids=body.return_token_ids is True,
        service_tier=_TIERS[body.service_tier][0] if body.service_tier else None,
    )


def _check(body: SamplingBody, card: ModelCard) -> None:
    wire.require_neutral(body, _NEUTRAL)
    if body.best_of not in (None, body.n or 1):
        raise wire.unsupported_value("best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "'prompt_logprobs' cannot be streamed.")
    require_token_ids(body.allowed_token_ids or (), "allowed_token_ids", card)


def _options(
    body: SamplingBody, card: ModelCard, max_tokens: int | None, logprobs: int | None
) -> GenerationOptions:
    common = common_options(body, card, max_tokens=max_tokens)
    tier = _TIERS[body.service_tier or "auto"]
    return replace(
        common,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_biases(body.logit_bias or {}, card),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        include_stop=body.include_stop_str_in_output is True,
        priority=tier[1] if body.priority is None else body.priority,
        keep_s=kept_seconds(body.prompt_cache_options, body.prompt_cache_retention),
    )


def _biases(given: dict[str, float], card: ModelCard) -> tuple[tuple[int, float], ...]:
    biases: list[tuple[int, float]] = []
    for key, bias in given.items():
        # More digits than any id has would only cost time to read.
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else -1
        require_token_id(token_id, "logit_bias", card)
        if bias:
            biases.append((token_id, bias))
    return tuple(biases)

"""How to generate, as several dialects say it: the fields and what they mean."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from service.conversation import GenerationOptions
from service.dialects.fields import (
    INT32,
    INT64,
    CacheSalt,
    MinP,
    Penalty,
    Priority,
    Seed,
    Stops,
    StopTokens,
    Temperature,
    Timeout,
    TopK,
    TopP,
)
from service.errors import invalid
from service.model_card import ModelCard


class Extensions(msgspec.Struct, frozen=True, kw_only=True):
    """What every dialect takes, whether or not its own API has it."""

    min_p: MinP | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: CacheSalt | None = None
    cache_report: bool | None = None


class CommonBody(Extensions, frozen=True, kw_only=True):
    """The part of a body that Chat Completions, Completions and Responses share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop: Stops | None = None


def common_options(
    body: CommonBody, card: ModelCard, *, max_tokens: int | None
) -> GenerationOptions:
    """What the shared fields ask for; the rest is the dialect's to add. Raises ApiError 400."""
    stop = body.stop or ()
    return replace(
        extension_options(body, card, max_tokens=max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else min(max(body.top_k, 0), card.vocab_size),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def extension_options(
    body: Extensions, card: ModelCard, *, max_tokens: int | None
) -> GenerationOptions:
    """The same of what every dialect takes. `max_tokens` is how many the body allows, where it
    says."""
    require_token_ids(body.stop_token_ids or (), "stop_token_ids", card)
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' is more than the {max_tokens} allowed tokens.")
    return GenerationOptions(
        max_tokens=max_tokens,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed & INT64,
        repetition_penalty=body.repetition_penalty,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        priority=body.priority or 0,
        timeout_s=body.timeout,
        salt=body.cache_salt or "",
        cache_report=body.cache_report is True,
    )


def require_token_id(token_id: int, param: str, card: ModelCard) -> None:
    """Raises ApiError 400 unless the model has such a token."""
    if not 0 <= token_id < card.vocab_size:
        raise invalid(
            param, f"Invalid '{param}': token ids are 0 to {card.vocab_size - 1} in this model."
        )


def require_token_ids(token_ids: Iterable[int], param: str, card: ModelCard) -> None:
    """The same for each of a list."""
    for index, token_id in enumerate(token_ids):
        require_token_id(token_id, f"{param}[{index}]", card)

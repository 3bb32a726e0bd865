"""OpenAI Completions, the request: a body's bytes to prompts and how to go on from them."""

import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from service.conversation import Conversation, GenerationOptions, GenerationRequest
from service.dialects import wire
from service.dialects.common import require_token_id
from service.dialects.fields import INT32, Name
from service.dialects.known_fields import CONSTRAINTS, KnownFields
from service.dialects.sampling import (
    INSIDE_SAMPLING,
    SHARED_HARMLESS,
    NumLogprobs,
    SamplingBody,
    decode_sampling,
)
from service.errors import invalid
from service.model_card import ModelCard

DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 64
MAX_CHOICES: Final = 128
MAX_PROMPT_TOKENS: Final = 1 << 20

Prompt: TypeAlias = str | NDArray[np.int32]
"""A text, or token ids, of which there may be a million: an array is made where they are read."""


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is Completions' own in a body; what is `Any` is refused where it is set.

    `prompt` is a text, texts, token ids, or lists of them: told apart after decoding.
    """

    model: Name
    prompt: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
    response_format: Any = None
    structured_outputs: Any = None


FIELDS: Final = KnownFields.of(
    CompletionBody,
    SamplingBody,
    harmless=SHARED_HARMLESS,
    length="max_tokens",
    system="prompt",
    meant=CONSTRAINTS,
    inside=INSIDE_SAMPLING,
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A decoded call: `n` choices for each prompt, in order; a prompt is text or token ids.

    `options.logprobs` is how many alternatives are shown with each token of an answer's text,
    which with `echo` begins with the prompt. `prompt_logprobs` asks for vLLM's list of the prompt.
    """

    id: str
    model: str
    prompts: tuple[Prompt, ...]
    options: GenerationOptions
    n: int
    echo: bool
    prompt_logprobs: int | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    service_tier: str | None

    @property
    def scores_echo(self) -> bool:
        """Whether the shown prompt needs log-probabilities."""
        return self.echo and self.options.logprobs is not None

    def generation(self, prompt: int) -> GenerationRequest:
        """The first choice of a prompt."""
        return GenerationRequest(
            id=f"{self.id}-p{prompt}" if prompt else self.id,
            model=self.model,
            conversation=Conversation(()),
            options=self.options,
        )


def decode(body: bytes, card: ModelCard) -> CompletionRequest:
    """The request in a body.

    Raises ApiError: 400 with the path of the field that is wrong, 404 for an unknown model.
    """
    FIELDS.check(body)
    wire_body = wire.decode(body, CompletionBody)
    card.require(wire_body.model)
    for name in ("suffix", "response_format", "structured_outputs"):
        if getattr(wire_body, name):
            raise wire.unsupported_value(name)
    max_tokens = DEFAULT_MAX_TOKENS if wire_body.max_tokens is None else wire_body.max_tokens
    sampling = decode_sampling(body, card, max_tokens=max_tokens, logprobs=wire_body.logprobs)
    prompts = _prompts(wire_body.prompt, card)
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise invalid(
            "n", f"{len(prompts)} prompts with 'n' {sampling.n} are over {MAX_CHOICES} choices."
        )
    options = sampling.options
    echo = wire_body.echo is True
    if echo and wire_body.logprobs is not None:
        most = max(wire_body.logprobs, options.prompt_logprobs or 0)
        options = replace(options, prompt_logprobs=most)
    return CompletionRequest(
        id=f"cmpl-{secrets.token_hex(16)}",
        model=card.id,
        prompts=prompts,
        options=options,
        n=sampling.n,
        echo=echo,
        prompt_logprobs=sampling.options.prompt_logprobs,
        stream=sampling.stream,
        include_usage=sampling.include_usage,
        return_token_ids=sampling.return_token_ids,
        service_tier=sampling.service_tier,
    )


def _prompts(given: str | list[Any], card: ModelCard) -> tuple[Prompt, ...]:
    """A text, token ids, or a batch of one or the other."""
    if isinstance(given, str):
        return (given,)
    if _is_id(given[0]):
        return (_token_ids(given, "prompt", card),)
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt", f"Invalid 'prompt': must be at most {MAX_PROMPTS} prompts.")
    prompts: list[Prompt] = []
    for index, prompt in enumerate(given):
        path = f"prompt[{index}]"
        if isinstance(prompt, str) and isinstance(given[0], str):
            prompts.append(prompt)
            continue
        if not isinstance(prompt, list) or not isinstance(given[0], list):
            raise invalid(
                path,
                f"Invalid '{path}': prompts are all texts, or all lists of token ids.",
                "invalid_type",
            )
        if not prompt:
            raise invalid(path, f"Invalid '{path}': must be at least 1 token.")
        prompts.append(_token_ids(prompt, path, card))
    return tuple(prompts)


def _token_ids(token_ids: list[Any], path: str, card: ModelCard) -> NDArray[np.int32]:
    """Raises ApiError 400 for what is no token of the model."""
    for index, token_id in enumerate(token_ids):
        if not _is_id(token_id):
            raise invalid(
                f"{path}[{index}]", f"Invalid '{path}[{index}]': expected int.", "invalid_type"
            )
        require_token_id(token_id, f"{path}[{index}]", card)
    return np.array(token_ids, dtype=np.int32)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

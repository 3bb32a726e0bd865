"""OpenAI Chat Completions, the request: a body's bytes to a GenerationRequest."""

import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from service.conversation import GenerationRequest, KeptPrefix, OutputFormat
from service.dialects import wire
from service.dialects.chat_messages import (
    INSIDE_PROMPT,
    MAX_PARTS,
    PART_FIELDS,
    Part,
    Prompt,
    decode_conversation,
    num_messages_to_keep,
)
from service.dialects.fields import BREAKPOINT_S, Name, TokenCount
from service.dialects.known_fields import CONSTRAINTS, KnownFields
from service.dialects.output_format import (
    FORMAT_FIELDS,
    ResponseFormat,
    decode_extras,
    decode_format,
)
from service.dialects.sampling import (
    INSIDE_SAMPLING,
    SHARED_HARMLESS,
    NumLogprobs,
    SamplingBody,
    decode_sampling,
)
from service.dialects.tool_choice import decode_tool_choice
from service.errors import invalid
from service.model_card import ModelCard


class Prediction(msgspec.Struct, frozen=True):
    """What the answer is expected to have."""

    type: Literal["content"]
    content: str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class ChatBody(Prompt, frozen=True, kw_only=True):
    """What is chat's own in a body; what is `Any` is refused where it is set."""

    model: Name
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[str], Meta(max_length=8)] | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    functions: Any = None
    audio: Any = None
    echo: Any = None
    add_generation_prompt: Any = None
    documents: Any = None
    chat_template: Any = None
    web_search_options: Any = None


FIELDS: Final = KnownFields.of(
    ChatBody,
    SamplingBody,
    harmless=f"function_call {SHARED_HARMLESS}",
    length="max_completion_tokens",
    system="messages",
    format="response_format",
    meant=CONSTRAINTS,
    inside={
        **INSIDE_PROMPT,
        **INSIDE_SAMPLING,
        "response_format": FORMAT_FIELDS,
        "prediction": KnownFields.within(Prediction, content=PART_FIELDS),
    },
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A decoded call: what to generate, and how to show it."""

    generation: GenerationRequest
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    service_tier: str | None


_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "audio": (),
    "echo": (False,),
    "add_generation_prompt": (True, False),
    "documents": ([],),
    "chat_template": (),
    "web_search_options": (),
}


def decode(body: bytes, card: ModelCard) -> ChatRequest:
    """The request in a body.

    Raises ApiError: 400 with the path of the field that is wrong, 404 for an unknown model.
    """
    FIELDS.check(body)
    wire_body = wire.decode(body, ChatBody)
    card.require(wire_body.model)
    _refuse_unsupported(wire_body)
    sampling = decode_sampling(
        body,
        card,
        max_tokens=wire_body.max_completion_tokens or wire_body.max_tokens,
        logprobs=_num_logprobs(wire_body),
    )
    conversation = decode_conversation(wire_body)
    kept: tuple[KeptPrefix, ...] = ()
    keep_s = sampling.options.keep_s
    if num_kept := num_messages_to_keep(wire_body):
        kept = (KeptPrefix(conversation.beginning(num_kept), keep_s or BREAKPOINT_S),)
        keep_s = None
    options = replace(
        sampling.options,
        keep_s=keep_s,
        tool_choice=decode_tool_choice(wire_body.tool_choice, conversation.tools),
        parallel_tool_calls=wire_body.parallel_tool_calls is not False,
        output_format=_output_format(wire_body),
        prediction=_prediction(wire_body.prediction),
    )
    return ChatRequest(
        generation=GenerationRequest(
            id=f"chatcmpl-{secrets.token_hex(16)}",
            model=card.id,
            conversation=conversation,
            options=options,
            kept=kept,
        ),
        n=sampling.n,
        stream=sampling.stream,
        include_usage=sampling.include_usage,
        return_token_ids=sampling.return_token_ids,
        service_tier=sampling.service_tier,
    )


def _prediction(prediction: Prediction | None) -> str:
    """Its text. Raises ApiError 400 for a part that is none."""
    if prediction is None:
        return ""
    if isinstance(prediction.content, str):
        return prediction.content
    for index, part in enumerate(prediction.content):
        if part.type != "text":
            raise wire.unsupported_value(f"prediction.content[{index}].type")
        if part.text is None:
            raise wire.missing_parameter(f"prediction.content[{index}].text")
    return "".join(part.text or "" for part in prediction.content)


def _refuse_unsupported(body: ChatBody) -> None:
    wire.require_neutral(body, _NEUTRAL)
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise wire.unsupported_value("add_generation_prompt")


def _output_format(body: ChatBody) -> OutputFormat | None:
    asked = decode_format(body.response_format, "response_format", nested=True)
    extra = decode_extras(body.structured_outputs)
    if asked and extra:
        raise invalid("structured_outputs", "Not both 'structured_outputs' and 'response_format'.")
    return asked or extra


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    return (body.top_logprobs or 0) if body.logprobs else None

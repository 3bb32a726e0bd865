"""The Responses dialect, inwards: `response.create` and POST /v1/responses to the canonical.

Structs hold what changes the answer or is echoed in it; what would change the meaning when it is
ignored is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from engine.types import MAX_TOP_LOGPROBS
from service.conversation import (
    Conversation,
    GenerationOptions,
    KeptPrefix,
    Message,
    OutputFormat,
    Tool,
)
from service.dialects import wire
from service.dialects.chat_messages import Kind, template_hints
from service.dialects.common import CommonBody, common_options
from service.dialects.fields import (
    BREAKPOINT_S,
    INT64,
    MAX_TOOLS,
    Echoed,
    Name,
    TokenCount,
    kept_seconds,
)
from service.dialects.known_fields import CACHE_OPTIONS, CONSTRAINTS, KnownFields
from service.dialects.output_format import (
    FORMAT_FIELDS,
    ResponseFormat,
    decode_extras,
    decode_format,
)
from service.dialects.responses_items import (
    ITEM_FIELDS,
    Input,
    decode_items,
    require_answered_calls,
)
from service.dialects.tool_choice import decode_tool_choice
from service.errors import ApiError, invalid
from service.model_card import DEFAULT_NAME, ModelCard

MAX_ITEMS: Final = 10_000
MAX_INCLUDED: Final = 64
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What OpenAI's API can include; of all but the first there is nothing here."""

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class TextOptions(msgspec.Struct, frozen=True):
    format: ResponseFormat | None = None
    verbosity: Kind | None = None


class Reasoning(msgspec.Struct, frozen=True):
    effort: Kind | None = None


class PromptCacheOptions(msgspec.Struct, frozen=True):
    prewarm: bool | None = None
    mode: Any = None
    ttl: Any = None
    comparison_response_id: Name | None = None


class ResponseCreate(CommonBody, frozen=True, kw_only=True):
    """The body as it came. `Any` marks what is refused unless neutral, or rendered verbatim."""

    model: Name
    input: str | Annotated[list[Raw], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    generate: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDED)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    structured_outputs: dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: Echoed | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Any = None
    user: Echoed | None = None
    safety_identifier: Echoed | None = None
    client_metadata: dict[str, Any] | None = None
    traceparent: str | None = None
    tracestate: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def comparison_id(self) -> str | None:
        """The response whose prompt this one is to be compared with."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    @property
    def generates(self) -> bool:
        """False for a warm-up: the prompt is computed and nothing is sampled."""
        prewarm = self.prompt_cache_options is not None and self.prompt_cache_options.prewarm
        return self.generate is not False and not prewarm


FIELDS: Final = KnownFields.of(
    ResponseCreate,
    harmless=(
        "type stream_id stream_options context_management moderation image personality "
        "access_programs background_options"
    ),
    length="max_output_tokens",
    system="instructions",
    format="text.format",
    meant={**CONSTRAINTS, "messages": "input"},
    inside={
        "input": ITEM_FIELDS,
        "tools": KnownFields.within(
            harmless="type name description parameters strict cache_control defer_loading "
            "allowed_callers output_schema async"
        ),
        "text": KnownFields.within(TextOptions, format=FORMAT_FIELDS),
        "prompt_cache_options": CACHE_OPTIONS,
    },
)


class TokenCountBody(ResponseCreate, frozen=True, kw_only=True):
    """The body of a token count, which may leave out the model."""

    model: Name = DEFAULT_NAME


class Envelope(msgspec.Struct, frozen=True):
    """What routes a client's message, whatever else it holds."""

    type: str
    stream_id: Any = None


class Steer(msgspec.Struct, frozen=True):
    previous_response_id: Name
    input: str | Annotated[list[Raw], Meta(max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class SteerRequest:
    """`response.steer`: what a client adds to a running response. `input` is as it came; where it
    cannot be used, `fault` says why."""

    previous_response_id: str
    input: str | list[Raw]
    messages: tuple[Message, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A checked `response.create`; what `previous_response_id` names is the store's business.

    The first `num_kept` messages of the input end at its last cache breakpoint.
    """

    body: ResponseCreate
    input: tuple[Message, ...]
    tools: tuple[Tool, ...]
    options: GenerationOptions
    num_kept: int = 0

    def conversation(self, chain: tuple[Message, ...]) -> Conversation:
        """What the model reads; `chain` is the former turns with this input at their end.

        Raises ApiError 400 when there is nothing to read, or calls and outputs do not pair.
        """
        instructions = self.body.instructions
        head = (Message("system", instructions),) if instructions is not None else ()
        if not head and not chain:
            message = "One of 'input', 'instructions' and 'previous_response_id' is required."
            raise invalid("input", message, "missing_required_parameter")
        require_answered_calls(chain)
        reasoning, text = self.body.reasoning or Reasoning(), self.body.text or TextOptions()
        kwargs = template_hints(reasoning.effort, text.verbosity)
        return Conversation(messages=head + chain, tools=self.tools, template_kwargs=kwargs)

    def kept(self, whole: Conversation) -> tuple[KeptPrefix, ...]:
        """What of the prompt its client asks to keep up to a breakpoint. `whole`: all of it."""
        if not self.num_kept:
            return ()
        num_messages = len(whole.messages) - len(self.input) + self.num_kept
        ttl_s = self.options.keep_s or BREAKPOINT_S
        return (KeptPrefix(whole.beginning(num_messages), ttl_s),)

    def trace_context(self, handshake: Mapping[str, str]) -> tuple[str | None, str | None]:
        """traceparent and tracestate, the nearest carrier first: client_metadata, the body's own
        keys, metadata, then the headers the connection began with."""
        body = self.body
        client, metadata = body.client_metadata or {}, body.metadata or {}
        prefix = "ws_request_header_"
        carriers = (
            (client.get(f"{prefix}traceparent"), client.get(f"{prefix}tracestate")),
            (body.traceparent, body.tracestate),
            (metadata.get("traceparent"), metadata.get("tracestate")),
            (handshake.get("traceparent"), handshake.get("tracestate")),
        )
        for parent, state in carriers:
            if isinstance(parent, str):
                return parent, state if isinstance(state, str) else None
        return None, None


_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "conversation": (),
    "prompt": (),
}
_FIELDS: Final = {
    "messages": "input",
    "token_ids": "input",
    "max_tokens": "max_output_tokens",
    "salt": "cache_salt",
    "deadline_ns": "timeout",
}


def decode_envelope(data: bytes) -> Envelope:
    """Raises ApiError 400 when `data` is not a JSON object with a string `type`."""
    return wire.decode(data, Envelope)


def decode_steer(data: bytes) -> SteerRequest:
    """Raises ApiError 400 with the path of the field where there is nothing to give back."""
    body = wire.decode(data, Steer)
    fault = ""
    messages: tuple[Message, ...] = ()
    try:
        messages = _input(body.input).messages
    except ApiError as error:
        fault = error.message
    else:
        expected = 1 if isinstance(body.input, str) else len(body.input)
        users = all(message.role == "user" for message in messages)
        if not messages or not users or len(messages) != expected:
            fault = "Only messages of the role 'user' steer a response, one at least."
    return SteerRequest(body.previous_response_id, body.input, messages, fault)


def decode_create(
    data: bytes, card: ModelCard, kind: type[ResponseCreate] = ResponseCreate
) -> CreateRequest:
    """The request in a body of a kind.

    Raises ApiError: 400 with the path of the field that is wrong, 404 for an unknown model.
    """
    FIELDS.check(data)
    body = wire.decode(data, kind)
    card.require(body.model)
    _refuse_unsupported(body)
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    options = replace(
        _options(body, card),
        tool_choice=decode_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output_format=_output_format(body),
    )
    input = _input(body.input)
    return CreateRequest(body, input.messages, tools, options, input.num_kept)


def in_this_dialect(error: ApiError) -> ApiError:
    """An error of the common path, with the name its field has here."""
    if error.param is not None:
        name = error.param.removeprefix("sampling.")
        error.param = _FIELDS.get(name, name)
    return error


def _refuse_unsupported(body: ResponseCreate) -> None:
    wire.require_neutral(body, _NEUTRAL)
    for index, asked in enumerate(body.include or ()):
        if asked not in INCLUDABLE:
            path = f"include[{index}]"
            known = ", ".join(INCLUDABLE)
            raise invalid(path, f"Invalid '{path}': {asked[:64]!r} is none of {known}.")
    if body.top_logprobs and not body.shows_logprobs:
        raise invalid("top_logprobs", f"'top_logprobs' needs {LOGPROBS!r} in 'include'.")


def _input(input: str | list[Raw] | None) -> Input:
    if isinstance(input, str):
        return Input((Message("user", input),))
    return decode_items(input or [])


def _tool(spec: dict[str, Any], path: str) -> Tool:
    """The flat tool of this dialect in the nested form that chat templates read."""
    wire.require_shallow(spec, path)
    if spec.get("type") is None:
        message = f"Missing required parameter: '{path}.type'; only 'function' is supported."
        raise invalid(f"{path}.type", message, "missing_required_parameter")
    if spec.get("type") != "function":
        raise invalid(f"{path}.type", f"Invalid '{path}.type': only 'function' is supported.")
    name = wire.require_name(spec.get("name"), f"{path}.name")
    function = {key: value for key, value in spec.items() if key != "type"}
    return Tool(name, {"type": "function", "function": function}, f"{path}.parameters")


def _output_format(body: ResponseCreate) -> OutputFormat | None:
    asked = decode_format(body.text.format if body.text else None, "text.format", nested=False)
    extra = decode_extras(body.structured_outputs)
    if asked and extra:
        raise invalid("structured_outputs", "Not both 'structured_outputs' and 'text.format'.")
    return asked or extra


def _options(body: ResponseCreate, card: ModelCard) -> GenerationOptions:
    options = body.prompt_cache_options
    return replace(
        common_options(body, card, max_tokens=body.max_output_tokens),
        max_tokens=body.max_output_tokens if body.generates else 0,
        logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
        keep_s=kept_seconds(
            None if options is None else {"ttl": options.ttl}, body.prompt_cache_retention
        ),
    )

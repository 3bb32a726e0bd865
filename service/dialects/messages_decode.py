"""Anthropic Messages, the request: a body's bytes to a GenerationRequest.

What the model reads is the same as for the same call in OpenAI's shape, tools included, so that
clients of both share what is cached.
"""

import json
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from service.conversation import (
    Conversation,
    GenerationOptions,
    GenerationRequest,
    JSONValue,
    KeptPrefix,
    OutputFormat,
    Tool,
    ToolChoice,
)
from service.dialects import wire
from service.dialects.chat_messages import MAX_MESSAGES, Kind, template_hints
from service.dialects.common import Extensions, extension_options
from service.dialects.fields import INT32, MAX_STOPS, MAX_TOOLS, Name, Stop, TopK, TopP
from service.dialects.known_fields import KnownFields
from service.dialects.messages_items import (
    BLOCK_FIELDS,
    CACHE_CONTROL,
    MESSAGE_FIELDS,
    Blocks,
    CacheBreakpoint,
    CacheControl,
    Turns,
    WireMessage,
)
from service.errors import ApiError, invalid
from service.model_card import ModelCard

MaxTokens: TypeAlias = Annotated[int, Meta(ge=0, le=INT32)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=1)]

_THINKS: Final = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class WireTool(msgspec.Struct, frozen=True):
    name: Name
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: Kind | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class WireToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=INT32)] | None = None


class WireFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Kind | None = None
    format: WireFormat | None = None


class Metadata(msgspec.Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=4096)] | None = None


class Diagnostics(msgspec.Struct, frozen=True):
    """Asks why the cache missed; without an id, to be compared with later."""

    previous_message_id: Name | None = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide what the model reads: the body of `count_tokens`."""

    model: Name
    messages: Annotated[list[WireMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[WireTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: WireToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    thread: dict[str, Any] | None = None


class MessagesBody(PromptBody, frozen=True, kw_only=True):
    """The wire's body; a `max_tokens` of 0 computes the prompt, for later calls to find."""

    max_tokens: MaxTokens
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = None


FIELDS: Final = KnownFields.of(
    MessagesBody,
    Extensions,
    harmless=(
        "container context_management mcp_servers speed betas anthropic_beta anthropic_version "
        "inference_geo user_profile_id workspace_id billing_policy compaction fallbacks "
        "fallback_credit_token"
    ),
    length="max_tokens",
    system="system",
    format="output_config.format",
    meant={"stop": "stop_sequences"},
    inside={
        "messages": MESSAGE_FIELDS,
        "system": BLOCK_FIELDS,
        "tools": KnownFields.within(
            WireTool,
            harmless="allowed_callers defer_loading eager_input_streaming input_examples",
            cache_control=CACHE_CONTROL,
        ),
        "tool_choice": KnownFields.within(WireToolChoice),
        "thinking": KnownFields.within(Thinking, harmless="display"),
        "output_config": KnownFields.within(
            OutputConfig, harmless="task_budget", format=KnownFields.within(WireFormat)
        ),
        "cache_control": CACHE_CONTROL,
    },
)


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A decoded call: what to generate, and how to show it.

    `diagnostics`: the client asks why its cache misses.
    """

    generation: GenerationRequest
    max_tokens: int
    stream: bool
    diagnostics: Diagnostics | None


def decode(body: bytes, card: ModelCard) -> MessagesRequest:
    """The request in a body.

    Raises ApiError: 400 with the path of the field that is wrong, 404 for an unknown model.
    """
    FIELDS.check(body)
    wire_body = wire.decode(body, MessagesBody)
    card.require(wire_body.model)
    extensions = wire.decode(body, Extensions)
    conversation, breakpoints = _conversation(wire_body)
    return MessagesRequest(
        generation=GenerationRequest(
            id=f"msg_{secrets.token_hex(16)}",
            model=card.id,
            conversation=conversation,
            options=_options(wire_body, extensions, card),
            kept=_kept(conversation, breakpoints),
        ),
        max_tokens=wire_body.max_tokens,
        stream=wire_body.stream is True,
        diagnostics=wire_body.diagnostics,
    )


def _kept(whole: Conversation, breakpoints: tuple[CacheBreakpoint, ...]) -> tuple[KeptPrefix, ...]:
    """What stands before the last breakpoint of each time to live, the longer times first."""
    last = {each.ttl_s: each.num_messages for each in breakpoints}
    return tuple(KeptPrefix(whole.beginning(count), ttl_s) for ttl_s, count in last.items())


def decode_prompt(body: bytes, card: ModelCard) -> Conversation:
    """What the model would read. Raises ApiError as `decode` does."""
    FIELDS.check(body)
    wire_body = wire.decode(body, PromptBody)
    card.require(wire_body.model)
    return _conversation(wire_body)[0]


def _conversation(body: PromptBody) -> tuple[Conversation, tuple[CacheBreakpoint, ...]]:
    if body.thread is not None:
        raise _no_threads()
    turns = Turns()
    tools: list[Tool] = []
    for index, tool in enumerate(body.tools or ()):
        tools.append(_tool(tool, f"tools[{index}]"))
        turns.mark(tool.cache_control, f"tools[{index}]")
    if body.system is not None:
        turns.add_system(body.system, "system")
    for index, message in enumerate(body.messages):
        turns.add(message, f"messages[{index}]")
    turns.require_answered()
    turns.mark(body.cache_control, "")
    if not turns.messages:
        raise invalid("messages", "The messages say nothing.")
    kwargs = template_hints(body.output_config.effort if body.output_config else None, None)
    if body.thinking is not None:
        kwargs["enable_thinking"] = _THINKS[body.thinking.type]
    conversation = Conversation(
        messages=tuple(turns.messages),
        tools=tuple(tools),
        template_kwargs=kwargs,
        continue_final=body.messages[-1].role == "assistant",
    )
    return conversation, tuple(turns.breakpoints)


def _tool_choice(body: PromptBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    if choice.type in ("auto", "none"):
        return ToolChoice("none" if choice.type == "none" else "auto")
    if not body.tools:
        raise invalid("tool_choice.type", f"'tool_choice.type' {choice.type!r} needs 'tools'.")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name is None:
        raise wire.missing_parameter("tool_choice.name")
    if choice.name not in {tool.name for tool in body.tools}:
        raise invalid(
            "tool_choice.name", f"Invalid 'tool_choice.name': no tool is called {choice.name!r}."
        )
    return ToolChoice("required", (choice.name,))


def _output_format(body: PromptBody) -> OutputFormat | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    path = "output_config.format.schema"
    schema = body.output_config.format.schema
    wire.require_shallow(schema, path)
    return OutputFormat("json_schema", json.dumps(schema, ensure_ascii=False), path)


def _no_threads() -> ApiError:
    """Threads keep the history on the server. At this code the SDK's tool runner, which asks for
    one unasked, goes on with the whole history in each call."""
    return invalid(
        "thread",
        "'thread' is not supported by this server: send the whole conversation without it.",
        code="thread_unsupported_request",
    )


def _tool(tool: WireTool, path: str) -> Tool:
    """The tool in the shape of OpenAI's chat completions, which is what templates render."""
    if tool.type not in (None, "custom"):
        raise invalid(f"{path}.type", f"Invalid '{path}.type': only 'custom' tools are supported.")
    if tool.input_schema is None:
        raise wire.missing_parameter(f"{path}.input_schema")
    wire.require_shallow(tool.input_schema, f"{path}.input_schema")
    function: dict[str, JSONValue] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    spec: dict[str, JSONValue] = {"type": "function", "function": function}
    return Tool(tool.name, spec, f"{path}.input_schema")


def _options(body: MessagesBody, more: Extensions, card: ModelCard) -> GenerationOptions:
    choice = body.tool_choice
    return replace(
        extension_options(more, card, max_tokens=body.max_tokens),
        fit_max_tokens=True,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else min(max(body.top_k, 0), card.vocab_size),
        stop=tuple(body.stop_sequences or ()),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        output_format=_output_format(body),
    )

"""OpenAI's chat messages and tools on the wire, and what they mean."""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from service.conversation import Conversation, JSONValue, Message, Role, Tool, ToolCall
from service.dialects import wire
from service.dialects.fields import MAX_NAME, MAX_TOOLS, Name, is_breakpoint
from service.dialects.known_fields import KnownFields
from service.errors import invalid

MAX_MESSAGES: Final = 10_000
MAX_PARTS: Final = 1_000
MAX_TOOL_CALLS: Final = 128

Kind: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content; only text can be read by the models served here.
    `prompt_cache_breakpoint` is a hint: what is not understood asks for nothing."""

    type: Kind
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Any = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: Name
    arguments: str


class WireToolCall(msgspec.Struct, frozen=True):
    id: Name
    function: CalledFunction | None = None
    type: Kind = "function"


class WireMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[WireToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None


PART_FIELDS: Final = KnownFields.within(
    Part, harmless="image_url input_audio file video_url audio_url cache_control"
)
"""Those of a part of a content."""
_CALL: Final = KnownFields.within(
    WireToolCall,
    harmless="custom index",
    function=KnownFields.within(CalledFunction),
)
_FUNCTION: Final = KnownFields.within(harmless="name description parameters strict")
INSIDE_PROMPT: Final = {
    "messages": KnownFields.within(
        WireMessage,
        harmless="audio function_call annotations reasoning reasoning_content",
        content=PART_FIELDS,
        tool_calls=_CALL,
    ),
    "tools": KnownFields.within(harmless="type custom cache_control function", function=_FUNCTION),
}
"""The fields of the objects in a `Prompt`."""


class Prompt(msgspec.Struct, frozen=True):
    """The fields of a body that decide what the model reads; `tools` are rendered verbatim."""

    messages: Annotated[list[WireMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Kind | None = None
    verbosity: Kind | None = None


def decode_conversation(prompt: Prompt) -> Conversation:
    """What the model reads. Raises ApiError 400 with the path of the field that is wrong."""
    messages = tuple(
        _message(message, f"messages[{index}]")
        for index, message in enumerate(prompt.messages or ())
    )
    if not messages:
        raise wire.missing_parameter("messages")
    continue_final = prompt.continue_final_message is True
    if continue_final and messages[-1].role != "assistant":
        raise invalid(
            "continue_final_message", "'continue_final_message' needs a last assistant message."
        )
    kwargs = template_hints(prompt.reasoning_effort, prompt.verbosity)
    kwargs |= prompt.chat_template_kwargs or {}
    wire.require_shallow(kwargs, "chat_template_kwargs")
    tools = enumerate(prompt.tools or ())
    return Conversation(
        messages=messages,
        tools=tuple(_tool(tool, f"tools[{index}]") for index, tool in tools),
        template_kwargs=kwargs,
        continue_final=continue_final,
    )


def template_hints(effort: str | None, verbosity: str | None) -> dict[str, JSONValue]:
    """What a template may read of how much to think and say; many read neither."""
    hints: dict[str, JSONValue] = {}
    if effort is not None:
        hints["reasoning_effort"] = effort
    if verbosity is not None:
        hints["verbosity"] = verbosity
    return hints


def num_messages_to_keep(prompt: Prompt) -> int:
    """How many messages there are up to the last one with a cache breakpoint, 0 for none."""
    for number in range(len(prompt.messages or ()), 0, -1):
        content = (prompt.messages or [])[number - 1].content
        parts = content if isinstance(content, list) else ()
        if any(is_breakpoint(part.prompt_cache_breakpoint) for part in parts):
            return number
    return 0


def _message(message: WireMessage, path: str) -> Message:
    calls = tuple(
        _tool_call(call, f"{path}.tool_calls[{index}]")
        for index, call in enumerate(message.tool_calls or ())
    )
    if calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", "Only an assistant message may call tools.")
    if message.role == "tool" and message.tool_call_id is None:
        raise wire.missing_parameter(f"{path}.tool_call_id")
    if message.role == "function" and message.name is None:
        raise wire.missing_parameter(f"{path}.name")
    if message.content is None and message.role != "assistant":
        raise wire.missing_parameter(f"{path}.content")
    role: Role = "tool" if message.role == "function" else message.role
    return Message(
        role=role,
        text=_text(message, path),
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
    )


def _text(message: WireMessage, path: str) -> str:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(
        _part(part, f"{path}.content[{index}]") for index, part in enumerate(message.content)
    )


def _part(part: Part, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise invalid(f"{path}.type", f"Invalid '{path}.type': this model reads text only.")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise wire.missing_parameter(f"{path}.{part.type}")
    return text


def _tool_call(call: WireToolCall, path: str) -> ToolCall:
    if call.type != "function":
        raise invalid(f"{path}.type", f"Invalid '{path}.type': only 'function' is supported.")
    if call.function is None:
        raise wire.missing_parameter(f"{path}.function")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _tool(spec: dict[str, Any], path: str) -> Tool:
    wire.require_shallow(spec, path)
    if spec.get("type") is None:
        message = f"Missing required parameter: '{path}.type'; only 'function' is supported."
        raise invalid(f"{path}.type", message, "missing_required_parameter")
    if spec.get("type") != "function":
        raise invalid(f"{path}.type", f"Invalid '{path}.type': only 'function' is supported.")
    function = spec.get("function")
    if not isinstance(function, dict):
        raise wire.missing_parameter(f"{path}.function")
    name = wire.require_name(function.get("name"), f"{path}.function.name")
    return Tool(name, spec, f"{path}.function.parameters")

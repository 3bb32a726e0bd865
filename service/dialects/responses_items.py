"""Input items of the Responses dialect to canonical messages.

Each item is decoded by the struct of its type, so an error names the item's own field. Consecutive
function calls join the assistant turn before them: one turn of the model is one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Raw

from service.conversation import Message, ToolCall
from service.dialects import wire
from service.dialects.fields import Name, is_breakpoint
from service.dialects.known_fields import KnownFields
from service.errors import invalid


class ItemHead(msgspec.Struct, frozen=True):
    """`type` may be absent on a message."""

    type: str | None = None


class Part(msgspec.Struct, frozen=True):
    """`prompt_cache_breakpoint` is a hint: what is not understood asks for nothing."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Any = None


Content: TypeAlias = str | list[Part]


class MessageItem(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(msgspec.Struct, frozen=True):
    call_id: Name
    name: Name
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, frozen=True):
    call_id: Name
    output: Content


_PART: Final = KnownFields.within(
    Part, harmless="annotations logprobs image_url file_id detail filename file_data file_url"
)
ITEM_FIELDS: Final = KnownFields.within(
    MessageItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    harmless="type id status phase summary encrypted_content caller namespace created_by outputs",
    content=_PART,
    output=_PART,
)
_TEXT_FIELDS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Input:
    """What an `input` says; the first `num_kept` messages end at its last cache breakpoint."""

    messages: tuple[Message, ...]
    num_kept: int = 0


def decode_items(items: Sequence[Raw]) -> Input:
    """Messages of the items, in order; reasoning is not shown to the model again.

    Raises ApiError 400 with a path such as `input[2].content[0].type`.
    """
    messages: list[Message] = []
    num_kept = 0
    for index, raw in enumerate(items):
        path = f"input[{index}]"
        kind = wire.decode(raw, ItemHead, path).type or "message"
        if kind == "message":
            item = wire.decode(raw, MessageItem, path)
            messages.append(Message(item.role, _text(item.content, f"{path}.content")))
            num_kept = len(messages) if _breaks(item.content) else num_kept
        elif kind == "function_call":
            _add_call(messages, wire.decode(raw, FunctionCallItem, path))
        elif kind == "function_call_output":
            output = wire.decode(raw, FunctionCallOutputItem, path)
            text = _text(output.output, f"{path}.output")
            messages.append(Message("tool", text, tool_call_id=output.call_id))
            num_kept = len(messages) if _breaks(output.output) else num_kept
        elif kind != "reasoning":
            raise invalid(
                f"{path}.type", f"Invalid '{path}.type': items of type {kind!r} are not supported."
            )
    return Input(tuple(messages), num_kept)


def require_answered_calls(messages: Sequence[Message]) -> None:
    """Raises ApiError 400 unless every call has an output after it, and every output a call."""
    known: set[str] = set()
    waiting: dict[str, None] = {}
    for message in messages:
        if message.role == "tool" and message.tool_call_id is not None:
            if message.tool_call_id not in known:
                text = f"No function call has the call_id {message.tool_call_id!r}."
                raise invalid("input", text)
            waiting.pop(message.tool_call_id, None)
        for call in message.tool_calls:
            known.add(call.id)
            waiting[call.id] = None
    for call_id in waiting:
        raise invalid("input", f"No output was given for the function call {call_id!r}.")


def _add_call(messages: list[Message], item: FunctionCallItem) -> None:
    call = ToolCall(item.call_id, item.name, item.arguments)
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        messages.append(replace(last, tool_calls=(*last.tool_calls, call)))
    else:
        messages.append(Message("assistant", tool_calls=(call,)))


def _breaks(content: Content) -> bool:
    parts = () if isinstance(content, str) else content
    return any(is_breakpoint(part.prompt_cache_breakpoint) for part in parts)


def _text(content: Content, path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: Part, path: str) -> str:
    field = _TEXT_FIELDS.get(part.type)
    if field is None:
        raise invalid(f"{path}.type", f"Invalid '{path}.type': this model reads text only.")
    text: str | None = getattr(part, field)
    if text is None:
        raise wire.missing_parameter(f"{path}.{field}")
    return text

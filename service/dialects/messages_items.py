"""Anthropic's messages and content blocks on the wire, and what they mean.

One wire message can become several canonical ones: each `tool_result` is a message of the role
"tool". Turns of one role that follow one another are one turn, as the protocol says.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from service.conversation import Message, Role, ToolCall
from service.dialects import wire
from service.dialects.chat_messages import MAX_PARTS, Kind
from service.dialects.fields import Name
from service.dialects.known_fields import KnownFields
from service.errors import invalid

BILLING_HEADER: Final = "x-anthropic-billing-header"
MAX_BREAKPOINTS: Final = 4
TTL_S: Final = {"5m": 300, "1h": 3600}


class CacheControl(msgspec.Struct, frozen=True):
    """Ends a prefix that the client asks to keep."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, frozen=True):
    """One content block of any type: which of the fields it has, its type says."""

    type: Kind
    text: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: "Content | None" = None
    cache_control: CacheControl | None = None


Blocks: TypeAlias = Annotated[list[Block], Meta(max_length=MAX_PARTS)]
Content: TypeAlias = str | Blocks


class WireMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: Content


CACHE_CONTROL: Final = KnownFields.within(CacheControl)
_OTHER_BLOCKS: Final = (
    "source citations title context thinking signature data is_error caller tool_references"
)
BLOCK_FIELDS: Final = KnownFields.within(
    Block,
    harmless=_OTHER_BLOCKS,
    cache_control=CACHE_CONTROL,
    content=KnownFields.within(Block, harmless=_OTHER_BLOCKS, cache_control=CACHE_CONTROL),
)
MESSAGE_FIELDS: Final = KnownFields.within(WireMessage, content=BLOCK_FIELDS)


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """A prefix to be kept for `ttl_s`: the tools, and so many messages from the first on."""

    num_messages: int
    ttl_s: int


class Turns:
    """Canonical messages as they are read from the wire, with the breakpoints among them.

    Every method raises ApiError 400 with the path of what is wrong.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.breakpoints: list[CacheBreakpoint] = []
        self._waiting: dict[str, str] = {}

    def add_system(self, content: Content, path: str) -> None:
        """A system text, without the billing header, which differs from call to call."""
        blocks = [Block("text", content)] if isinstance(content, str) else content
        texts: list[str] = []
        marks: list[tuple[CacheControl | None, str]] = []
        for index, block in enumerate(blocks):
            text = _text(block, f"{path}[{index}]")
            if text.startswith(BILLING_HEADER):
                text = text.partition("\n")[2]
                if not text:
                    continue
            texts.append(text)
            marks.append((block.cache_control, f"{path}[{index}]"))
        if texts:
            self.messages.append(Message("system", "\n".join(texts)))
        for mark in marks:
            self.mark(*mark)

    def add(self, message: WireMessage, path: str) -> None:
        """One message of the wire."""
        path = f"{path}.content"
        if message.role == "system":
            self.add_system(message.content, path)
            return
        if message.role == "assistant":
            self.require_answered()
        if isinstance(message.content, str):
            self._say(message.role, message.content)
            return
        if not message.content:
            if message.role == "user":
                raise invalid(path, f"Invalid '{path}': must have at least one block.")
            self._say(message.role, "")
        for index, block in enumerate(message.content):
            self._add_block(message.role, block, f"{path}[{index}]")

    def mark(self, cached: CacheControl | None, path: str) -> None:
        """A breakpoint after what was added last, where `cached` asks for one."""
        if cached is None:
            return
        path = f"{path}.cache_control" if path else "cache_control"
        if len(self.breakpoints) == MAX_BREAKPOINTS:
            raise invalid(path, f"Invalid '{path}': at most {MAX_BREAKPOINTS} can be set.")
        ttl_s = TTL_S[cached.ttl or "5m"]
        if self.breakpoints and ttl_s > self.breakpoints[-1].ttl_s:
            raise invalid(
                path, f"Invalid '{path}.ttl': a longer one must come before shorter ones."
            )
        self.breakpoints.append(CacheBreakpoint(len(self.messages), ttl_s))

    def require_answered(self) -> None:
        """Every call has its result."""
        for call_id, path in self._waiting.items():
            raise invalid(path, f"'{path}' has no 'tool_result' for {call_id!r} after it.")

    def _add_block(self, role: Literal["user", "assistant"], block: Block, path: str) -> None:
        if role == "assistant" and block.type == "tool_use":
            call = _call(block, path)
            self._waiting[call.id] = path
            self._say(role, "", (call,))
        elif role == "assistant" and block.type in ("thinking", "redacted_thinking"):
            self._say(role, "")  # what was thought is not shown to the model again
        elif role == "user" and block.type == "tool_result":
            self._add_result(block, path)
        else:
            self._say(role, _text(block, path))
        self.mark(block.cache_control, path)

    def _add_result(self, block: Block, path: str) -> None:
        call_id = block.tool_use_id
        if call_id is None:
            raise wire.missing_parameter(f"{path}.tool_use_id")
        if self._waiting.pop(call_id, None) is None:
            raise invalid(
                f"{path}.tool_use_id",
                f"Invalid '{path}.tool_use_id': the turn before has no 'tool_use' {call_id!r}.",
            )
        content = block.content or ""
        text = content if isinstance(content, str) else _texts(content, f"{path}.content")
        self.messages.append(Message("tool", text, tool_call_id=call_id))

    def _say(self, role: Role, text: str, calls: tuple[ToolCall, ...] = ()) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != role:
            self.messages.append(Message(role, text, tool_calls=calls))
            return
        joined = "\n".join(filter(None, (last.text, text)))
        self.messages[-1] = replace(last, text=joined, tool_calls=(*last.tool_calls, *calls))


def _text(block: Block, path: str) -> str:
    if block.type != "text":
        raise invalid(
            f"{path}.type",
            f"Invalid '{path}.type': {block.type!r} blocks cannot stand here; "
            "this model reads text only.",
        )
    if block.text is None:
        raise wire.missing_parameter(f"{path}.text")
    return block.text


def _texts(blocks: Sequence[Block], path: str) -> str:
    return "\n".join(_text(block, f"{path}[{index}]") for index, block in enumerate(blocks))


def _call(block: Block, path: str) -> ToolCall:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise wire.missing_parameter(f"{path}.{name}")
    assert block.id is not None and block.name is not None
    wire.require_shallow(block.input, f"{path}.input")
    # The spacing that models learn, so that what they wrote is found again in the cache.
    return ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))

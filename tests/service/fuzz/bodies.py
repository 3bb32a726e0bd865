"""Bodies that nobody meant, made from the wire's own types: one strategy for each dialect."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from service.dialects.chat_decode import ChatBody
from service.dialects.completions_decode import CompletionBody
from service.dialects.messages_decode import MessagesBody
from service.dialects.responses_decode import ResponseCreate
from service.dialects.sampling import SamplingBody
from tests.service.conftest import MODEL

_BLOCK_TYPES: Final = [
    "text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "input_text",
    "output_text", "refusal", "message", "function_call", "function_call_output", "reasoning",
    "item_reference", "function", "custom", "json_schema", "json_object", "ephemeral",
]  # fmt: skip
_TYPES: Final = st.sampled_from(_BLOCK_TYPES)
_ROLES: Final = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
_NUMBERS: Final = [0, 1, -1, 257, 2**31, 2**63, -(2**70), 1e308]
_SCALARS: Final = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", MODEL, "auto", "required", "none", "24h", *_NUMBERS, *_BLOCK_TYPES])
)
ANY_JSON: Final[SearchStrategy[Any]] = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
_IDS: Final = st.sampled_from(["a", "b"]) | st.text(max_size=5)
_PARTS: Final = st.fixed_dictionaries(
    {"type": _TYPES | ANY_JSON},
    optional={
        "text": st.text(max_size=20) | ANY_JSON,
        "refusal": ANY_JSON,
        "id": _IDS,
        "tool_use_id": _IDS,
        "name": _IDS,
        "input": st.dictionaries(st.text(max_size=5), ANY_JSON, max_size=2) | ANY_JSON,
        "content": st.text(max_size=9) | ANY_JSON,
        "cache_control": st.just({"type": "ephemeral"}) | ANY_JSON,
    },
)
_CONTENT: Final = st.text(max_size=20) | st.lists(_PARTS, max_size=3) | ANY_JSON
_CALLS: Final = st.lists(
    st.fixed_dictionaries({"id": _IDS, "function": ANY_JSON}, optional={"type": ANY_JSON}),
    max_size=2,
)
_MESSAGES: Final = st.fixed_dictionaries(
    {"role": _ROLES},
    optional={"content": _CONTENT, "tool_calls": _CALLS, "tool_call_id": _IDS, "name": ANY_JSON},
)
_ITEMS: Final = st.fixed_dictionaries(
    {},
    optional={
        "type": _TYPES | ANY_JSON,
        "role": _ROLES,
        "content": _CONTENT,
        "call_id": _IDS,
        "name": _IDS,
        "arguments": st.text(max_size=9) | ANY_JSON,
        "output": _CONTENT,
        "id": _IDS,
        "summary": ANY_JSON,
    },
)
_SCHEMAS: Final = st.fixed_dictionaries(
    {}, optional={"type": _TYPES | ANY_JSON, "properties": ANY_JSON, "required": ANY_JSON}
)
_FUNCTIONS: Final = st.fixed_dictionaries(
    {"name": _IDS}, optional={"parameters": _SCHEMAS | ANY_JSON, "strict": ANY_JSON}
)
_TOOLS: Final = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": _FUNCTIONS})
    | st.fixed_dictionaries(
        {"name": _IDS},
        optional={
            "type": st.sampled_from(["function", "custom"]) | ANY_JSON,
            "input_schema": _SCHEMAS | ANY_JSON,
            "parameters": _SCHEMAS | ANY_JSON,
            "cache_control": ANY_JSON,
        },
    )
    | ANY_JSON,
    max_size=2,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where bodies go, and how to make them: `sound` is one that is in order."""

    paths: tuple[str, ...]
    sound: dict[str, Any]
    wire: tuple[type[msgspec.Struct], ...]
    likely: dict[str, SearchStrategy[Any]]

    def bodies(self) -> SearchStrategy[bytes]:
        """Those of `meant`; or any JSON, or any bytes."""
        meant = self.meant().map(msgspec.json.encode)
        return meant | meant | ANY_JSON.map(msgspec.json.encode) | st.binary(max_size=60)

    def meant(self) -> SearchStrategy[dict[str, Any]]:
        """A sound body with anything in some of its fields, likely values in others."""
        names = sorted({each.encode_name for kind in self.wire for each in _fields(kind)})
        anything = st.dictionaries(st.sampled_from(names), ANY_JSON, min_size=1, max_size=3)
        likely = st.fixed_dictionaries({}, optional=self.likely)

        def put(parts: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
            return {**self.sound, **parts[1], **parts[0]}

        return st.tuples(anything | st.just({}), likely).map(put)


def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


_HELLO: Final = {"role": "user", "content": "hi"}
_TOKENS: Final = st.lists(st.integers(-2, 300), max_size=4)

DIALECTS: Final[dict[str, Dialect]] = {
    "chat": Dialect(
        ("/v1/chat/completions",),
        {"model": MODEL, "messages": [_HELLO]},
        (ChatBody, SamplingBody),
        {
            "messages": st.lists(_MESSAGES, max_size=4),
            "tools": _TOOLS,
            "continue_final_message": st.booleans(),
            "stream": st.booleans(),
        },
    ),
    "completions": Dialect(
        ("/v1/completions",),
        {"model": MODEL, "prompt": "hi", "max_tokens": 5},
        (CompletionBody, SamplingBody),
        {
            "prompt": st.lists(st.text(max_size=9) | _TOKENS, max_size=3) | _TOKENS,
            "echo": st.booleans(),
            "logprobs": st.integers(-1, 25),
            "n": st.integers(-1, 5),
            "stream": st.booleans(),
        },
    ),
    "responses": Dialect(
        ("/v1/responses", "/v1/responses/input_tokens"),
        {"model": MODEL, "input": "hi"},
        (ResponseCreate,),
        {
            "input": st.lists(_ITEMS | _MESSAGES, max_size=4),
            "tools": _TOOLS,
            "instructions": st.text(max_size=9),
            "stream": st.booleans(),
            "store": st.booleans(),
        },
    ),
    "messages": Dialect(
        ("/v1/messages", "/v1/messages/count_tokens"),
        {"model": MODEL, "max_tokens": 9, "messages": [_HELLO]},
        (MessagesBody,),
        {
            "messages": st.lists(_MESSAGES, max_size=4).map(lambda more: [_HELLO, *more]),
            "system": _CONTENT,
            "tools": _TOOLS,
            "stream": st.booleans(),
        },
    ),
}


def frames() -> SearchStrategy[str | bytes]:
    """Messages of the WebSocket that nobody meant: creates made like bodies, steers, any JSON, any
    text, any bytes."""
    lanes = st.sampled_from(["a", "b", "", "x y"]) | ANY_JSON
    creates = st.tuples(
        DIALECTS["responses"].meant(),
        st.fixed_dictionaries({}, optional={"stream_id": lanes, "generate": st.booleans()}),
    ).map(lambda parts: {"type": "response.create", **parts[0], **parts[1]})
    steers = st.fixed_dictionaries(
        {"type": st.just("response.steer")},
        optional={
            "previous_response_id": _IDS | ANY_JSON,
            "input": st.lists(_ITEMS | _MESSAGES, max_size=3) | ANY_JSON,
            "stream_id": lanes,
        },
    )
    others = st.fixed_dictionaries(
        {}, optional={"type": st.just("response.processed") | ANY_JSON, "stream_id": lanes}
    )
    told = (creates | creates | steers | others | ANY_JSON).map(
        lambda message: msgspec.json.encode(message).decode()
    )
    return told | told | st.text(max_size=60) | st.binary(max_size=60)

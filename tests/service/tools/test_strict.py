"""Strict tools that may, but need not be called: text is free, calls are held to their schemas."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from service.conversation import (
    Conversation,
    GenerationOptions,
    GenerationRequest,
    JSONValue,
    Message,
    Tool,
    ToolChoice,
)
from service.tools.formats import AnswerFormat, FormatName
from service.tools.grammar import grammar_for
from tests.service.tools.byte_tokens import TOKENIZER

SCHEMA: dict[str, JSONValue] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, strict: bool | None) -> Tool:
    function: dict[str, JSONValue] = {"name": name, "parameters": SCHEMA, "strict": strict}
    return Tool(name, {"type": "function", "function": function})


def grammar(format: FormatName, *tools: Tool, **options: Any) -> str:
    conversation = Conversation((Message("user", "hi"),), tools=tools)
    request = GenerationRequest("r", "m", conversation, GenerationOptions(**options))
    return grammar_for(request, AnswerFormat(format, thinks=False), {}, False)


def matches(grammar: str, text: str) -> bool:
    """Whether the grammar takes the whole text, and lets it end there."""
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.get_error(), matcher.get_error()
    data = text.encode()
    return matcher.validate_tokens(list(data)) == len(data) and (
        matcher.consume_tokens(list(data)) and matcher.is_accepting()
    )


def written(format: FormatName, arguments: Any, name: str = "weather") -> str:
    """A call as the format writes it."""
    key = "parameters" if format == "llama" else "arguments"
    call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "generic": f"<tool_call>\n{call}\n</tool_call>",
        "llama": f"<|python_tag|>{call}",
        "mistral": f"[TOOL_CALLS][{call}]",
        "mistral-args": f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}",
    }[format]


FORMATS: list[FormatName] = ["hermes", "generic", "llama", "mistral", "mistral-args"]


@pytest.mark.parametrize("format", FORMATS)
def test_text_is_free_and_calls_are_not(format: FormatName) -> None:
    strict = grammar(format, tool("weather", True), tool("other", None))
    good = written(format, {"city": "Zürich"})
    for text in ("", "Hello.\n\nNo call", '{"a": 1}', "{", good, f"Look:\n{good}", "a < b <tool"):
        assert matches(strict, text), text
    wrongs: list[Any] = [{}, {"city": 3}, {"city": "x", "more": 1}, []]
    for wrong in wrongs:
        assert not matches(strict, f"Look: {written(format, wrong)}"), wrong
    assert not matches(strict, written(format, {"city": "x"}, name="unknown"))
    assert matches(strict, written(format, {"anything": [1]}, name="other"))


@pytest.mark.parametrize("format", ["generic", "llama"])
def test_a_call_without_a_mark_is_held_to_its_schema_too(format: FormatName) -> None:
    strict = grammar(format, tool("weather", True))
    key = "parameters" if format == "llama" else "arguments"
    assert matches(strict, json.dumps({"name": "weather", key: {"city": "x"}}))
    assert not matches(strict, json.dumps({"name": "weather", key: {"town": "x"}}))
    assert matches(strict, json.dumps({"name": "Ada", "age": 36}))


@pytest.mark.parametrize("format", ["hermes", "generic"])
def test_several_calls_and_text_between(format: FormatName) -> None:
    call = written(format, {"city": "x"})
    strict = grammar(format, tool("weather", True))
    assert matches(strict, f"One {call}\n{call} and done.")
    assert not matches(strict, f"One {call}\n{written(format, {})}")


def test_without_strict_tools_an_answer_is_free() -> None:
    assert grammar("hermes", tool("weather", None), tool("other", False)) == ""
    never = ToolChoice(mode="none")
    assert grammar("hermes", tool("weather", True), tool_choice=never) == ""

"""Messages, tools and calls as a template sees them."""

import json
from pathlib import Path

import pytest

from service.conversation import Conversation, JSONValue, Message, Role, Tool, ToolCall
from service.prompts.messages import template_messages
from service.prompts.template import ChatTemplate

PLAIN = ChatTemplate(Path("m"), "{{ messages }}")
FULL = ChatTemplate(Path("m"), "{{ tools }}{{ messages[0].tool_calls }}{{ 'developer' }}")
SPEC: dict[str, JSONValue] = {
    "type": "function",
    "function": {"name": "weather", "description": "Wie ist's in <Köln>?", "parameters": {}},
}
TOOL = Tool("weather", SPEC)


def only(message: Message, template: ChatTemplate) -> dict[str, JSONValue]:
    (rendered,) = template_messages(Conversation((message,)), template)
    return rendered


def call(arguments: str) -> ToolCall:
    return ToolCall("call_1", "weather", arguments)


def test_a_plain_message_has_role_and_content_only() -> None:
    assert only(Message("user", "hi"), FULL) == {"role": "user", "content": "hi"}
    assert only(Message("assistant"), FULL) == {"role": "assistant", "content": ""}


def test_a_tool_result_names_its_call() -> None:
    message = Message("tool", "12°", name="weather", tool_call_id="call_1")
    assert only(message, FULL) == {
        "role": "tool", "content": "12°", "name": "weather", "tool_call_id": "call_1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"b": 1.0, "a": "ü"}', {"b": 1.0, "a": "ü"}),
        ("", ""),
        ('{"cut', '{"cut'),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_an_object_where_they_are_one(arguments: str, seen: JSONValue) -> None:
    message = only(Message("assistant", "", tool_calls=(call(arguments),)), FULL)
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": seen}}
    ]
    assert message["content"] == ""


@pytest.mark.parametrize(("template", "role"), [(PLAIN, "system"), (FULL, "developer")])
def test_developer_is_system_where_the_template_does_not_know_it(
    template: ChatTemplate, role: Role
) -> None:
    assert only(Message("developer", "Be brief."), template)["role"] == role


def test_tools_go_into_the_system_message_of_a_template_without_tools() -> None:
    conversation = Conversation((Message("developer", "Be brief."), Message("user", "hi")), (TOOL,))
    system, user = template_messages(conversation, PLAIN)
    content = system["content"]
    assert isinstance(content, str)
    before, _, rest = content.partition("\n\n# Tools\n")
    assert before == "Be brief."
    line = rest[rest.rindex("<tools>\n") + 8 : rest.rindex("\n</tools>")]
    assert json.loads(line) == SPEC and "<Köln>" in line
    assert user == {"role": "user", "content": "hi"}


def test_tools_make_a_system_message_where_there_is_none() -> None:
    system, user = template_messages(Conversation((Message("user", "hi"),), (TOOL, TOOL)), PLAIN)
    assert system["role"] == "system" and str(system["content"]).startswith("# Tools\n")
    assert str(system["content"]).count('"name": "weather"') == 2
    assert user["role"] == "user"


def test_tools_are_left_to_a_template_that_reads_them() -> None:
    conversation = Conversation((Message("user", "hi"),), (TOOL,))
    assert template_messages(conversation, FULL) == [{"role": "user", "content": "hi"}]


def test_calls_go_into_the_text_of_a_template_without_calls() -> None:
    calls = (call('{"city": "Köln"}'), call(""))
    message = only(Message("assistant", "Let me see.", tool_calls=calls), PLAIN)
    assert message["content"] == (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    )

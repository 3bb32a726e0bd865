"""A conversation as the variables of a chat template: messages and tools in OpenAI's shape."""

import json
from typing import TypeAlias

from service.conversation import Conversation, JSONValue, Message, ToolCall
from service.prompts.template import ChatTemplate
from service.prompts.tool_section import calls_section, tools_section

TemplateMessage: TypeAlias = "dict[str, JSONValue]"


def template_messages(conversation: Conversation, template: ChatTemplate) -> list[TemplateMessage]:
    """The messages to render, what the template does not know put into words that it does.

    "developer" becomes "system" for a template that has no such role. For one that does not read
    tools, their specs go into the first system message; for one that does not read tool calls,
    the calls go into the assistant's text.
    """
    messages = [_template_message(message, template) for message in conversation.messages]
    if conversation.tools and not template.reads_tools:
        section = tools_section(conversation.tools)
        if messages and messages[0]["role"] == "system":
            text = messages[0]["content"]
            messages[0]["content"] = f"{text}\n\n{section}" if text else section
        else:
            messages.insert(0, {"role": "system", "content": section})
    return messages


def _template_message(message: Message, template: ChatTemplate) -> TemplateMessage:
    role: str = message.role
    if role == "developer" and not template.mentions_developer:
        role = "system"
    rendered: TemplateMessage = {"role": role, "content": message.text}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        if not template.mentions_tool_calls:
            section = calls_section(message.tool_calls)
            rendered["content"] = f"{message.text}\n{section}" if message.text else section
    return rendered


def _template_call(call: ToolCall) -> JSONValue:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": _parsed_arguments(call.arguments)},
    }


def _parsed_arguments(arguments: str) -> JSONValue:
    """The arguments as an object where they are one, which is what templates expect; else text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments

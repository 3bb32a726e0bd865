"""What was said, as OpenTelemetry's GenAI attributes hold it; only where that is asked for.

Lists of messages as JSON text: `{role, parts}`, parts of type text, reasoning, tool_call or
tool_call_response.
"""

from typing import Final, TypeAlias

import msgspec

from service.conversation import Message
from service.events import (
    ReasoningDelta,
    RequestRecord,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)

Part: TypeAlias = dict[str, object]

_TEXTS: Final = {TextDelta: "text", ReasoningDelta: "reasoning"}


def content_attributes(choices: list[RequestRecord]) -> dict[str, str]:
    """Of a request's span; nothing where nothing was captured, or the prompt was no messages."""
    captured = [choice.content for choice in choices if choice.content is not None]
    if not captured:
        return {}
    attributes: dict[str, str] = {}
    if captured[0].conversation.messages:
        messages = [_input(message) for message in captured[0].conversation.messages]
        attributes["gen_ai.input.messages"] = _json(messages)
    attributes["gen_ai.output.messages"] = _json([_output(choice) for choice in choices])
    return attributes


def _input(message: Message) -> dict[str, object]:
    if message.tool_call_id is not None:
        part = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.text}
        return {"role": message.role, "parts": [part]}
    parts: list[Part] = [{"type": "text", "content": message.text}] if message.text else []
    parts += [_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    return {"role": message.role, "parts": parts}


def _output(record: RequestRecord) -> dict[str, object]:
    """Pieces of a kind that follow one another are one part."""
    parts: list[Part] = []
    calls: dict[int, list[str]] = {}
    begun: dict[int, ToolCallStarted] = {}
    for event in record.content.events if record.content is not None else ():
        if isinstance(event, TextDelta | ReasoningDelta):
            kind = _TEXTS[type(event)]
            if parts and parts[-1]["type"] == kind:
                parts[-1]["content"] = f"{parts[-1]['content']}{event.text}"
            elif event.text:
                parts.append({"type": kind, "content": event.text})
        elif isinstance(event, ToolCallStarted):
            begun[event.index], calls[event.index] = event, []
        elif isinstance(event, ToolCallDelta):
            calls[event.index].append(event.arguments)
    for index, call in begun.items():
        parts.append(_call(call.id, call.name, "".join(calls[index])))
    told: dict[str, object] = {"role": "assistant", "parts": parts}
    if record.finish_reason is not None:
        told["finish_reason"] = record.finish_reason.value
    return told


def _call(call_id: str, name: str, arguments: str) -> Part:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _json(messages: list[dict[str, object]]) -> str:
    return msgspec.json.encode(messages).decode()

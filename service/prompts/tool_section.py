"""Tools in plain text, for models whose chat template knows none: the format of Hermes and Qwen."""

import json

from service.conversation import Tool, ToolCall

_BEFORE = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def tools_section(tools: tuple[Tool, ...]) -> str:
    """What the system message says of the tools: one line of JSON each, in the given order."""
    specs = "\n".join(json.dumps(tool.spec, ensure_ascii=False) for tool in tools)
    return f"{_BEFORE}{specs}{_AFTER}"


def calls_section(calls: tuple[ToolCall, ...]) -> str:
    """Calls that the assistant made, in the form that `tools_section` asks for."""
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, '
        f'"arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in calls
    )

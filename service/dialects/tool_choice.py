"""`tool_choice` of OpenAI's dialects. Chat nests what it names under the type's own key, the
Responses dialect does not; both forms are read in either."""

from typing import Any, Final

from service.conversation import Tool, ToolChoice
from service.dialects import wire
from service.errors import invalid

_PATH: Final = "tool_choice"


def decode_tool_choice(value: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Raises ApiError 400 with the path of what is wrong, and where a tool is not among `tools`."""
    known = {tool.name for tool in tools}
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        choice = ToolChoice("required")
    elif isinstance(value, str):
        raise invalid(_PATH, f"Invalid '{_PATH}': expected one of none, auto, required.")
    elif value.get("type") == "function":
        choice = ToolChoice("required", (_name(value, _PATH, known),))
    elif value.get("type") == "allowed_tools":
        choice = _allowed(value, known)
    else:
        raise wire.unsupported_value(f"{_PATH}.type")
    if choice.mode == "required" and not known:
        raise invalid(_PATH, f"'{_PATH}' asks for a call, but no 'tools' are given.")
    return choice


def _allowed(value: dict[str, Any], known: set[str]) -> ToolChoice:
    path = _PATH
    if isinstance(value.get("allowed_tools"), dict):
        value, path = value["allowed_tools"], f"{_PATH}.allowed_tools"
    mode, tools = value.get("mode", "auto"), value.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{path}.mode", f"Invalid '{path}.mode': expected auto or required.")
    if not isinstance(tools, list) or not tools:
        raise invalid(f"{path}.tools", f"Invalid '{path}.tools': expected a list of tools.")
    names = (_name(tool, f"{path}.tools[{i}]", known) for i, tool in enumerate(tools))
    return ToolChoice("required" if mode == "required" else "auto", tuple(names))


def _name(value: Any, path: str, known: set[str]) -> str:
    if not isinstance(value, dict):
        raise invalid(path, f"Invalid '{path}': expected an object.", "invalid_type")
    if isinstance(value.get("function"), dict):
        value, path = value["function"], f"{path}.function"
    name = value.get("name")
    if not isinstance(name, str):
        raise invalid(f"{path}.name", f"Invalid '{path}.name': expected a string.", "invalid_type")
    if name not in known:
        raise invalid(f"{path}.name", f"Invalid '{path}.name': no tool has the name {name!r}.")
    return name

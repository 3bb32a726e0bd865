"""What an answer must look like, as one grammar in the form that llguidance serialises."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from service.conversation import GenerationRequest, JSONValue, OutputFormat, Tool
from service.tools import reasoning
from service.tools.formats import MARKS, AnswerFormat

MAX_CALLS: Final = 16
"""Of one answer that must call: a small model would go on and on."""

_FREE: Final[JSONValue] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
_COMPACT: Final[JSONValue] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_ANYTHING: Final[dict[str, JSONValue]] = {"type": "object"}


def grammar_for(
    request: GenerationRequest, format: AnswerFormat, marker_ids: Mapping[str, int], thinking: bool
) -> str:
    """The grammar that a request's answer must match; "" where it may be anything.

    `marker_ids` are the markers that are special tokens; `thinking`: the prompt has opened the
    thoughts. Thoughts are free, the grammar begins after them. White space in JSON is bounded: at
    most eight characters in a row, and in arguments none but a space after each mark.
    """
    options = request.options
    names = request.callable_tools
    must_call = options.tool_choice.mode == "required" and bool(names)
    writer = _Writer(format, marker_ids)
    if not must_call and options.output_format is None:
        if not _enforced_tools(request) or format.name == "pythonic":
            return ""
        talk = writer.talk([t for t in request.conversation.tools if t.name in names])
        return writer.grammar([talk], thinking=thinking)
    answers: list[str] = []
    if names and (must_call or options.output_format is not None):
        tools = [tool for tool in request.conversation.tools if tool.name in names]
        answers.append(writer.calls(tools, parallel=options.parallel_tool_calls))
    if not must_call and options.output_format is not None:
        answers.append(writer.body(options.output_format))
    return writer.grammar(answers, thinking=thinking)


def schemas_of(request: GenerationRequest) -> list[tuple[str, Any]]:
    """The schemas in a request's grammar, with the paths of their fields in its body."""
    schemas: list[tuple[str, Any]] = []
    asked = request.options.output_format
    if asked is not None and asked.kind == "json_schema":
        schemas.append((asked.path, json.loads(asked.source)))
    enforced = _enforced_tools(request)
    tools = (tool for tool in request.conversation.tools if tool.name in enforced)
    schemas.extend((tool.schema_path, parameters_of(tool)) for tool in tools)
    return schemas


def _enforced_tools(request: GenerationRequest) -> frozenset[str]:
    """Names of the tools whose arguments the grammar holds to their schemas: the strict ones, and
    all where the whole answer is written by a grammar."""
    options = request.options
    whole = options.tool_choice.mode == "required" or options.output_format is not None
    tools = (tool for tool in request.conversation.tools if tool.name in request.callable_tools)
    return frozenset(tool.name for tool in tools if whole or is_strict(tool))


class _Writer:
    """Rules of the main grammar, and the grammars that it refers to by name."""

    def __init__(self, format: AnswerFormat, marker_ids: Mapping[str, int]) -> None:
        self._format = format
        self._marker_ids = marker_ids
        self._rules: list[str] = []
        self._named: list[JSONValue] = []

    def grammar(self, answers: Sequence[str], *, thinking: bool) -> str:
        """All of it; `answers` are the rules that the answer may be."""
        think = ""
        if self._format.thinks:
            think = "thought" if thinking else "think?"
            if not thinking:
                self._rules.append(f"think: {self._text(reasoning.OPEN)} thought")
            self._rules += self._thought()
        top = f"start: {think} ({' | '.join(answers)})"
        lark = "\n".join([top, *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._named]}, ensure_ascii=False)

    def body(self, format: OutputFormat) -> str:
        """The rule of a text that matches `format`."""
        match format.kind:
            case "json_schema":
                return self._schema("body", json.loads(format.source), _FREE)
            case "choice":
                choices = " | ".join(map(json.dumps, json.loads(format.source)))
                self._rules.append(f"body: {choices}")
                return "body"
            case "regex":
                lark = f"start: /{_in_slashes(format.source)}/"
            case "lark":
                lark = format.source
        self._named.append({"name": "body", "lark_grammar": lark})
        return "@body"

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """The rule of one call or several, as the model's format writes them."""
        self._rules += self._objects(tools)
        more = f"{{0,{MAX_CALLS - 1}}}" if parallel else "{0}"
        marks = MARKS[self._format.written]
        if marks.end:
            begin, end = self._text(marks.start), self._text(marks.end)
            self._rules.append(f'call: {begin} "\\n" object "\\n" {end}')
            self._rules.append(f'calls: call ("\\n" call){more}' if parallel else "calls: call")
        elif marks.between:
            self._rules.append(f"call: {self._text(marks.start)} object")
            self._rules.append(f"calls: call call{more}" if parallel else "calls: call")
        elif self._format.written == "mistral":
            many = f'(", " object){more}' if parallel else ""
            self._rules.append(f'calls: {self._text(marks.start)} "[" object {many} "]"')
        else:
            many = f'("; " object){more}' if parallel else ""
            self._rules.append(f"calls: object {many}")
        return "calls"

    def talk(self, tools: Sequence[Tool]) -> str:
        """The rule of free text in which calls may stand. From its mark on a call is held to its
        tool, where that is strict to its schema too; the marks are lazy, so that what follows one
        cannot be read as text."""
        held = [tool if is_strict(tool) else Tool(tool.name, {}) for tool in tools]
        self._rules += [*self._objects(held), r"text: /(.|\n)*/"]
        marks = MARKS[self._format.written]
        if marks.start in self._marker_ids:
            self._rules.append(f"lead: text {self._text(marks.start)}")
        else:
            self._rules.append(rf"lead[lazy]: /(.|\n)*/ {self._text(marks.start)}")
        if marks.end:
            self._rules.append(f'call: lead "\\n" object "\\n" {self._text(marks.end)}')
        elif marks.between:
            self._rules.append("call: lead object")
        elif self._format.written == "mistral":
            self._rules.append('call: lead "[" object (", " object)* "]"')
        else:
            self._rules.append('call: lead object ("; " object)*')
        bare = "bare?" if marks.at_start else ""
        if bare:
            self._rules += self._bare_objects(tools)
        self._rules.append(f"talk: {bare} call{{0,{MAX_CALLS}}} text")
        return "talk"

    def _bare_objects(self, tools: Sequence[Tool]) -> list[str]:
        """Rules of a call that begins the answer without a mark: its head is its mark."""
        rules = ["bare: " + " | ".join(f"bare_{i}" for i in range(len(tools)))]
        for index, tool in enumerate(tools):
            name = re.escape(json.dumps(tool.name, ensure_ascii=False)).replace("/", r"\/")
            head = rf'[ \t\r\n]{{0,8}}\{{ ?"name": ?{name}, ?"(arguments|parameters)":'
            rules.append(f"head_{index}[lazy]: /{head}/")
            rules.append(f'bare_{index}: head_{index} " "? @arguments_{index} "}}"')
        return rules

    def _objects(self, tools: Sequence[Tool]) -> list[str]:
        key = "parameters" if self._format.written == "llama" else "arguments"
        between = MARKS[self._format.written].between
        rules = ["object: " + " | ".join(f"object_{i}" for i in range(len(tools)))]
        for index, tool in enumerate(tools):
            name = json.dumps(tool.name, ensure_ascii=False)
            head = json.dumps(f'{{"name": {name}, "{key}": ', ensure_ascii=False)
            arguments = self._schema(f"arguments_{index}", parameters_of(tool), _COMPACT)
            if between:
                rules.append(f"object_{index}: {name} {self._text(between)} {arguments}")
            else:
                rules.append(f'object_{index}: {head} {arguments} "}}"')
        return rules

    def _schema(self, name: str, schema: Any, style: JSONValue) -> str:
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": style}
        self._named.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def _thought(self) -> list[str]:
        space = r"space: /[ \t\r\n]{0,8}/"
        close = self._marker_ids.get(reasoning.CLOSE)
        if close is not None:
            return [rf"thought: /(.|\n)*/ <[{close}]> space", space]
        closing = json.dumps(reasoning.CLOSE)
        return ["thought: musing space", rf"musing[suffix={closing}]: /(.|\n)*/", space]

    def _text(self, marker: str) -> str:
        token_id = self._marker_ids.get(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def is_strict(tool: Tool) -> bool:
    """Whether its client wants each call of the tool to match its schema."""
    function = tool.spec.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def parameters_of(tool: Tool) -> Any:
    """The schema of a tool's arguments: any object where it has none."""
    function = tool.spec.get("function")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    return _ANYTHING if parameters is None else parameters


def _in_slashes(regex: str) -> str:
    """A regular expression between Lark's slashes: those of its own, and line ends, escaped."""
    result: list[str] = []
    escaped = False
    for character in regex:
        if character == "/" and not escaped:
            result.append("\\/")
        elif character == "\n":
            result.append("n" if escaped else "\\n")
        else:
            result.append(character)
        escaped = character == "\\" and not escaped
    return "".join(result)

"""Tool formats: how a model writes its calls, found in its chat template or set by name."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from service.tools import reasoning
from service.tools.marked import MarkedJson, Marks
from service.tools.named_args import CALL_ID, NamedArgs
from service.tools.pieces import ToolParser
from service.tools.pythonic import Pythonic

FormatName: TypeAlias = Literal["hermes", "llama", "pythonic", "mistral", "mistral-args", "generic"]
FORMAT_NAMES: Final[tuple[FormatName, ...]] = (
    "hermes",
    "llama",
    "pythonic",
    "mistral",
    "mistral-args",
    "generic",
)

MARKS: Final[dict[str, Marks]] = {
    "hermes": Marks("<tool_call>", "</tool_call>"),
    "generic": Marks("<tool_call>", "</tool_call>", at_start=True),
    "llama": Marks("<|python_tag|>", at_start=True),
    "mistral": Marks("[TOOL_CALLS]"),
    "mistral-args": Marks("[TOOL_CALLS]", between="[ARGS]"),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one model writes: its tool calls, and whether it thinks aloud first."""

    name: FormatName
    thinks: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must be seen although they may be special tokens."""
        marks = MARKS.get(self.name)
        calls: tuple[str, ...] = ()
        if marks is not None:
            calls = tuple(filter(None, (marks.start, marks.end, marks.between)))
            calls += (CALL_ID,) if marks.between else ()
        return calls + ((reasoning.OPEN, reasoning.CLOSE) if self.thinks else ())

    @property
    def written(self) -> str:
        """The format of calls that a grammar writes: JSON where the model's own is Python."""
        return "llama" if self.name == "pythonic" else self.name

    def parser(
        self, names: Collection[str], *, parallel: bool, by_grammar: bool = False
    ) -> ToolParser:
        """A parser for one answer in which the tools `names` may be called; `by_grammar`: the
        calls in it are written by a grammar."""
        if self.name == "pythonic" and not by_grammar:
            return Pythonic(names, parallel=parallel)
        marks = MARKS[self.written]
        if marks.between:
            return NamedArgs(marks.start, marks.between, names, parallel=parallel)
        return MarkedJson(marks, names, parallel=parallel)


_SIGNS: Final[tuple[tuple[FormatName, Callable[[str], bool]], ...]] = (
    ("hermes", lambda template: "<tool_call>" in template),
    ("mistral-args", lambda template: "[TOOL_CALLS]" in template and "[ARGS]" in template),
    ("mistral", lambda template: "[TOOL_CALLS]" in template),
    ("pythonic", lambda template: "[func_name1(params_name1=params_value1" in template),
    ("llama", lambda template: '"parameters": dictionary of argument name' in template),
    ("llama", lambda template: "<|python_tag|>" in template),
)


def format_of(template: str | None, override: FormatName | None = None) -> AnswerFormat:
    """The format that a chat template asks the model for; `override` names another for calls.

    A template that knows no tools gets the generic one, which `prompts.tool_section` describes.
    """
    source = template or ""
    found: FormatName = next((name for name, sign in _SIGNS if sign(source)), "generic")
    return AnswerFormat(override or found, thinks=reasoning.CLOSE in source)

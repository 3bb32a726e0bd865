"""A model's chat template, compiled once and rendered in jinja2's immutable sandbox.

The environment is the one that templates are written for, that of
`transformers.apply_chat_template`: trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that does not escape HTML, and a `generation` tag without effect.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.text import TextError
from service.conversation import JSONValue
from service.errors import ApiError, invalid

MAX_RENDER_S: Final = 10.0
_MAX_REASON: Final = 500


class OutputTooLong(Exception):
    """The template puts out more than it may: the prompt cannot fit the context."""


class ChatTemplate:
    """One model's template. Threads may render at the same time.

    The template comes with the model: the sandbox keeps it from the process, and length and time
    are checked at each piece it puts out. A loop that puts out nothing is bounded only by
    jinja2's limit on ranges.
    """

    __slots__ = ("_template", "mentions_developer", "mentions_tool_calls", "reads_tools")

    def __init__(self, path: Path, source: str | None) -> None:
        """`path` names the model. Raises TextError for a missing or malformed template."""
        if source is None:
            raise TextError(
                path,
                "the model has no chat template: put its chat_template.jinja into the model's "
                "folder, or use a GGUF file with the key tokenizer.chat_template",
            )
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise TextError(path, f"the chat template is malformed: {error}") from error
        self.reads_tools = "tools" in variables
        self.mentions_tool_calls = "tool_calls" in source
        self.mentions_developer = "developer" in source

    def render(self, variables: Mapping[str, JSONValue], max_characters: int) -> str:
        """The prompt's text.

        Raises ApiError (400, param "messages") when the template refuses the variables, fails on
        them or takes longer than MAX_RENDER_S; OutputTooLong beyond `max_characters`.
        """
        deadline = time.monotonic() + MAX_RENDER_S
        pieces: list[str] = []
        num_characters = 0
        for piece in self._pieces(variables):
            pieces.append(piece)
            num_characters += len(piece)
            if num_characters > max_characters:
                raise OutputTooLong
            if time.monotonic() > deadline:
                raise _refused(f"it takes longer than {MAX_RENDER_S:g} s")
        return "".join(pieces)

    def _pieces(self, variables: Mapping[str, JSONValue]) -> Iterator[str]:
        try:
            yield from self._template.generate(variables)
        except Exception as error:  # a template fails on its input with any exception at all
            raise _refused(str(error)[:_MAX_REASON] or type(error).__name__) from error


def _refused(reason: str) -> ApiError:
    return invalid("messages", f"The model's chat template cannot render the messages: {reason}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """`namespace()` that takes no underscored names, as transformers restricts it too."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

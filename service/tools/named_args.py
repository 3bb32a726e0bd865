"""Calls whose name stands before a marker and their arguments behind it: Mistral's later models."""

from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from service.tools.by_character import CharacterParser
from service.tools.json_call import SPACE, JsonValue
from service.tools.pieces import Arguments, CallDone, CallStarted, Piece, Text

CALL_ID: Final = "[CALL_ID]"
"""May stand behind the name, with an id that clients are not shown."""
_MAX_ID: Final = 64


class _State(Enum):
    TEXT = auto()
    HEAD = auto()  # the name, perhaps an id, and the marker of the arguments
    BEFORE = auto()  # the arguments must begin
    ARGUMENTS = auto()


class NamedArgs(CharacterParser):
    """A ToolParser for `[TOOL_CALLS]name[ARGS]{…}`, each call with a mark of its own.

    White space directly before a mark, or after the last call at the answer's end, belongs to
    neither call nor text. A mark that no call follows is text. Without `parallel`, what follows
    the first complete call is dropped.
    """

    def __init__(self, start: str, between: str, names: Collection[str], *, parallel: bool) -> None:
        """`start` and `between` are the marks before the name and before the arguments."""
        super().__init__(parallel=parallel)
        self._start = start
        self._between = between
        self._names = names
        self._state = _State.TEXT
        self._matched = 0  # how many characters of the start mark end what is held
        self._head = ""
        self._name = ""
        self._value = JsonValue()

    def _take(self, character: str) -> list[Piece]:
        match self._state:
            case _State.TEXT:
                return self._in_text(character)
            case _State.HEAD:
                return self._in_head(character)
            case _State.BEFORE:
                return self._before_arguments(character)
            case _State.ARGUMENTS:
                return self._in_arguments(character)

    def _in_text(self, character: str) -> list[Piece]:
        if character == self._start[self._matched]:
            self._held += character
            self._matched += 1
            if self._matched == len(self._start):
                self._matched, self._head, self._state = 0, "", _State.HEAD
            return []
        if self._matched:
            return self._no_call(character)
        self._held += character
        if character in SPACE:
            return []
        held, self._held = self._held, ""
        return [Text(held)]

    def _in_head(self, character: str) -> list[Piece]:
        self._head += character
        name, bracket, rest = self._head.partition("[")
        rest = bracket + rest
        if not bracket:
            fits = any(each.startswith(name) for each in self._names)
        else:
            fits = name in self._names and self._may_lead(rest)
        if not fits:
            return self._no_call(character)
        self._held += character
        if bracket and rest.endswith(self._between):
            self._name, self._state = name, _State.BEFORE
        return []

    def _may_lead(self, rest: str) -> bool:
        """Whether this can stand between a name and its arguments."""
        if self._between.startswith(rest) or CALL_ID.startswith(rest):
            return True
        bound = len(CALL_ID) + _MAX_ID + len(self._between)
        return rest.startswith(CALL_ID) and len(rest) <= bound

    def _before_arguments(self, character: str) -> list[Piece]:
        if character in SPACE:
            self._held += character
            return []
        if character != "{":
            return self._no_call(character)
        self._held, self._called = "", True
        self._value, self._state = JsonValue(), _State.ARGUMENTS
        return [CallStarted(self._name), *self._in_arguments(character)]

    def _in_arguments(self, character: str) -> list[Piece]:
        self._value.take(character)
        if not self._value.done:
            return [Arguments(character)]
        self._state = _State.TEXT
        return [Arguments(character), CallDone()]

    def _no_call(self, character: str) -> list[Piece]:
        """What was held is text; the character after it may begin another mark."""
        held, self._held, self._matched = self._held, "", 0
        self._state = _State.TEXT
        return [Text(held), *self._in_text(character)]

"""Calls written as Python: `[weather(city="Paris", days=3), time()]`, as Llama 3.2 and 4 do."""

import ast
import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from service.tools.by_character import CharacterParser
from service.tools.json_call import SPACE
from service.tools.pieces import Arguments, CallDone, CallStarted, Piece, Text

_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_CLOSERS: Final = {"[": "]", "{": "}", "(": ")"}
_ESCAPES: Final = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\"}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


class PythonString:
    """A Python string literal to JSON's, character by character."""

    __slots__ = ("_digits", "_escape", "_quote", "done")

    def __init__(self, quote: str) -> None:
        """quote: the character it began with; JSON's own quote is the caller's to put out."""
        self._quote = quote
        self._escape = ""
        self._digits = ""
        self.done = False

    def take(self, character: str) -> str:
        """The JSON of one more character; sets `done` with the closing quote."""
        if not self._escape:
            if character == "\\":
                self._escape = character
                return ""
            if character == self._quote:
                self.done = True
                return '"'
            return _in_json(character)
        if self._escape == "\\":
            if character in _HEX_DIGITS:
                self._escape = character
                return ""
            self._escape = ""
            if character == "\n":
                return ""
            if character in "'\"":
                return _in_json(character)
            return _ESCAPES.get(character) or "\\\\" + _in_json(character)
        return self._in_number(character)

    def _in_number(self, character: str) -> str:
        if character not in "0123456789abcdefABCDEF":
            broken = "\\\\" + self._escape + self._digits
            self._escape = self._digits = ""
            return broken + self.take(character)
        self._digits += character
        if len(self._digits) < _HEX_DIGITS[self._escape]:
            return ""
        kind, digits = self._escape, self._digits
        self._escape = self._digits = ""
        if kind == "u":
            return "\\u" + digits
        return _in_json(chr(min(int(digits, 16), 0x10FFFF)))


class PythonValue:
    """A Python literal to JSON, character by character, up to the `,` or `)` that ends it."""

    __slots__ = ("_closers", "_comma", "_string", "_word", "ended")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._comma = False
        self._string: PythonString | None = None
        self._word = ""
        self.ended = False

    def take(self, character: str) -> str:
        """The JSON of one more character; sets `ended` where it is not part of the value."""
        if self._string is not None:
            text = self._string.take(character)
            if self._string.done:
                self._string = None
            return text
        if character in SPACE:
            return self._end_word()
        if character in "'\"":
            self._string = PythonString(character)
            return self._end_word() + self._after_comma() + '"'
        if character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            return self._after_comma() + ("[" if character == "(" else character)
        if character in ",)]}":
            return self._end_word() + self._at_end(character)
        if character == ":":
            return self._end_word() + ": "
        self._word += character
        return ""

    def _at_end(self, character: str) -> str:
        if not self._closers:
            self.ended = True
            return ""
        if character == ",":
            self._comma = True
            return ""
        self._comma = False
        closer = self._closers.pop()
        return "]" if closer == ")" else closer

    def _after_comma(self) -> str:
        comma, self._comma = self._comma, False
        return ", " if comma else ""

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        return self._after_comma() + (_WORDS.get(word) or _number(word) or json.dumps(word))


class _State(Enum):
    START = auto()  # before the list
    NAME = auto()
    KEY = auto()
    VALUE = auto()
    AFTER = auto()  # after a call
    TEXT = auto()


class Pythonic(CharacterParser):
    """A ToolParser for a list of Python calls at the very beginning of the answer.

    A call starts with its first keyword or its closing parenthesis; what cannot be such a list,
    or follows it, is text. Without `parallel`, what follows the first call is dropped.
    """

    def __init__(self, names: Collection[str], *, parallel: bool) -> None:
        super().__init__(parallel=parallel)
        self._names = names
        self._state = _State.START
        self._name = ""
        self._key = ""
        self._num_arguments = 0
        self._value = PythonValue()

    def _take(self, character: str) -> list[Piece]:
        match self._state:
            case _State.TEXT:
                return [Text(character)]
            case _State.START:
                return self._at_start(character)
            case _State.NAME:
                return self._in_name(character)
            case _State.KEY:
                return self._in_key(character)
            case _State.VALUE:
                return self._in_value(character)
            case _State.AFTER:
                return self._after_call(character)

    def _text(self, character: str) -> list[Piece]:
        held, self._held = self._held, ""
        self._state = _State.TEXT
        return [Text(held + character)]

    def _at_start(self, character: str) -> list[Piece]:
        if character not in SPACE + "[":
            return self._text(character)
        self._held += character
        if character == "[":
            self._state, self._name = _State.NAME, ""
        return []

    def _in_name(self, character: str) -> list[Piece]:
        if character == "(" and self._name in self._names:
            self._held += character
            self._state, self._key, self._num_arguments = _State.KEY, "", 0
            return []
        if character in SPACE and not self._name:
            self._held += character
            return []
        self._name += character
        if not any(name.startswith(self._name) for name in self._names):
            return self._text(character)
        self._held += character
        return []

    def _in_key(self, character: str) -> list[Piece]:
        if character == ")" and not self._key:
            pieces = self._start() if not self._num_arguments else []
            return pieces + self._end_call()
        if character == "=" and self._key.isidentifier():
            pieces = self._start() if not self._num_arguments else [Arguments(", ")]
            self._num_arguments += 1
            self._state, self._value = _State.VALUE, PythonValue()
            return [*pieces, Arguments(json.dumps(self._key, ensure_ascii=False) + ": ")]
        if character not in SPACE and not (self._key + character).isidentifier():
            return self._text(character)
        if not self._num_arguments:
            self._held += character
        if character not in SPACE:
            self._key += character
        return []

    def _in_value(self, character: str) -> list[Piece]:
        json_text = self._value.take(character)
        pieces: list[Piece] = [Arguments(json_text)]
        if self._value.ended:
            self._state, self._key = _State.KEY, ""
            if character == ")":
                pieces += self._end_call()
        return pieces

    def _after_call(self, character: str) -> list[Piece]:
        if character in SPACE + "]":
            return []
        if character == ",":
            self._state, self._name = _State.NAME, ""
            return []
        return self._text(character)

    def _start(self) -> list[Piece]:
        self._held = ""
        self._called = True
        return [CallStarted(self._name), Arguments("{")]

    def _end_call(self) -> list[Piece]:
        self._state = _State.AFTER
        return [Arguments("}"), CallDone()]


def _in_json(character: str) -> str:
    return json.dumps(character, ensure_ascii=False)[1:-1]


def _number(word: str) -> str:
    """The JSON of a Python number; "" where the word is none."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    return json.dumps(value) if isinstance(value, int | float) else ""

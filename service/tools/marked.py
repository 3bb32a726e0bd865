"""Calls as JSON objects behind a marker: Hermes and Qwen, Mistral, Llama, and models without."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from service.tools.json_call import SPACE, JsonCall, NotACall
from service.tools.pieces import CallDone, Piece, Text, joined

_SEPARATORS = SPACE + ",;]"


@dataclass(frozen=True, slots=True)
class Marks:
    """How calls stand in the text.

    start: the text before them, whose first character stands in it once; end: the text after
    them, or "" for none. `between`: the text between the name of a call and its arguments, where
    they are not one object. `at_start`: they may also stand bare at the very beginning of the
    answer.
    """

    start: str
    end: str = ""
    between: str = ""
    at_start: bool = False


class _State(Enum):
    TEXT = auto()
    BEFORE = auto()  # an object, or a list of them, must begin
    CALL = auto()  # inside an object
    AFTER = auto()  # a separator, another object, a mark, or text


class MarkedJson:
    """A ToolParser for the calls between marks: one object, several, or a list of them.

    White space directly before a marker, between calls, or after them at the answer's end belongs
    to neither call nor text. A marker that no call follows is text. Without `parallel`, what
    follows the first complete call is dropped.
    """

    def __init__(self, marks: Marks, names: Collection[str], *, parallel: bool) -> None:
        self._marks = marks
        self._names = names
        self._parallel = parallel
        self._bare = marks.at_start
        self._state = _State.BEFORE if marks.at_start else _State.TEXT
        self._held = ""  # not yet known to be text or not
        self._matched = 0  # how many characters of the start mark end what is held
        self._call = JsonCall(names)
        self._called = False
        self._mute = False

    def feed(self, text: str) -> list[Piece]:
        """See ToolParser."""
        pieces: list[Piece] = []
        position = 0
        while position < len(text) and not self._mute:
            end = position
            if self._state is _State.TEXT and not self._held:
                end = self._plain_until(text, position)
            if end > position:
                pieces.append(Text(text[position:end]))
                position = end
            else:
                pieces += self._take(text[position])
                position += 1
            if not self._parallel and CallDone() in pieces[-1:]:
                self._mute = True
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """See ToolParser."""
        held, self._held = self._held, ""
        text = self._state is not _State.AFTER and not (self._called and held.isspace())
        return joined([Text(held)] if text else [])

    def _plain_until(self, text: str, position: int) -> int:
        """Where the first white space or possible marker stands from `position` on."""
        first = self._marks.start[0]
        for index in range(position, len(text)):
            if text[index] == first or text[index] in SPACE:
                return index
        return len(text)

    def _take(self, character: str) -> list[Piece]:
        match self._state:
            case _State.TEXT:
                return self._in_text(character)
            case _State.BEFORE:
                return self._before_call(character)
            case _State.CALL:
                return self._in_call(character)
            case _State.AFTER:
                return self._after_call(character)

    def _in_text(self, character: str) -> list[Piece]:
        start = self._marks.start
        if character == start[self._matched]:
            self._held += character
            self._matched += 1
            if self._matched == len(start):
                self._matched = 0
                self._state = _State.BEFORE
            return []
        if self._matched:
            return [*self._release(), *self._in_text(character)]
        self._held += character
        return [] if character in SPACE else self._release()

    def _before_call(self, character: str) -> list[Piece]:
        if character in SPACE or (character == "[" and not self._held.endswith("[")):
            self._held += character
            return []
        if character == "{":
            return self._open()
        if self._bare:
            again, self._held = self._held + character, ""
            self._bare = False
            self._state = _State.TEXT
            return [piece for each in again for piece in self._take(each)]
        return [*self._release(), *self._in_text(character)]

    def _open(self) -> list[Piece]:
        self._bare = False
        self._state = _State.CALL
        self._call = JsonCall(self._names)
        self._held += "{"
        return self._call.feed("{")

    def _in_call(self, character: str) -> list[Piece]:
        call = self._call
        try:
            pieces = call.feed(character)
        except NotACall:
            if not call.started:
                return [*self._release(), *self._take(character)]
            self._state = _State.AFTER
            return self._after_call(character)
        if call.started:
            self._held = ""
            self._called = True
        else:
            self._held += character
        if call.closed:
            self._state = _State.AFTER
        return pieces

    def _after_call(self, character: str) -> list[Piece]:
        marks = self._marks
        self._held += character
        if self._held in (marks.start, marks.end):
            ended = self._held == marks.end
            self._held = "" if ended else self._held
            self._state = _State.TEXT if ended else _State.BEFORE
            return []
        if any(mark.startswith(self._held) for mark in (marks.start, marks.end)):
            return []
        again, self._held = self._held, ""
        if again in _SEPARATORS:
            return []
        if again == "{":
            return self._open()
        self._state = _State.TEXT
        return [piece for each in again for piece in self._take(each)]

    def _release(self) -> list[Piece]:
        """What was held is text, and so is what follows."""
        held, self._held, self._matched = self._held, "", 0
        self._state = _State.TEXT
        return [Text(held)]

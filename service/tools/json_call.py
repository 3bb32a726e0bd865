"""One call written as a JSON object, read character by character."""

import json
from collections.abc import Collection
from typing import Final

from service.tools.pieces import Arguments, CallDone, CallStarted, Piece

SPACE: Final = " \t\r\n"
_NAME_KEYS: Final = frozenset({"name", "function"})
_ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters", "args"})
_OTHER_KEYS: Final = frozenset({"type", "id", "index"})


class NotACall(Exception):
    """What was read cannot become a call of a known tool."""


class JsonValue:
    """Finds where a JSON value ends by its brackets and strings; it is not checked otherwise."""

    __slots__ = ("_depth", "_escaped", "_in_string", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def take(self, character: str) -> bool:
        """Whether the character belongs to the value; sets `done` with the last that does.

        A bare word or number ends before the first character that is not part of it.
        """
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self.done = not self._depth
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if not self._depth:
                self.done = True
                return False
            self._depth -= 1
            self.done = not self._depth
        elif not self._depth and character in ",:" + SPACE:
            self.done = True
            return False
        return True


class JsonCall:
    """Reads `{"name": …, "arguments": {…}}`, its keys in any order.

    The call starts once its name and the beginning of its arguments are known, and is complete
    with the end of the arguments; from there on nothing can undo it. Arguments go out as they are
    written; a string that holds them (some models do that) goes out decoded, at its end.
    """

    __slots__ = (
        "_arguments",
        "_buffer",
        "_expect",
        "_held",
        "_key",
        "_name",
        "_names",
        "_value",
        "closed",
        "complete",
        "started",
    )

    def __init__(self, names: Collection[str]) -> None:
        """names: of the tools that may be called. The first character fed is the `{`."""
        self._names = names
        self._expect = "{"
        self._buffer = ""
        self._key = ""
        self._name = ""
        self._value = JsonValue()
        self._held: list[str] = []
        self._arguments = False
        self.started = False
        self.complete = False
        self.closed = False

    def feed(self, character: str) -> list[Piece]:
        """The pieces that one more character brings; sets `closed` with the final `}`.

        Raises NotACall, and takes nothing in, where the character does not fit.
        """
        if self._expect == "value":
            return self._in_value(character)
        if self._expect == "key":
            return self._in_key(character)
        if character in SPACE:
            return []
        if character not in self._expect:
            raise NotACall
        return self._at_mark(character)

    def _at_mark(self, character: str) -> list[Piece]:
        if character == "{":
            self._expect = '"}'
        elif character == '"':
            self._expect, self._buffer, self._value = "key", '"', JsonValue()
            self._value.take('"')
        elif character == ":":
            self._expect, self._buffer, self._value = "value", "", JsonValue()
        elif character == ",":
            self._expect = '"'
        else:
            return self._close()
        return []

    def _in_key(self, character: str) -> list[Piece]:
        self._value.take(character)
        self._buffer += character
        if self._value.done:
            self._key = _string(self._buffer)
            repeated = (self._key in _NAME_KEYS and bool(self._name)) or (
                self._key in _ARGUMENT_KEYS and self._arguments
            )
            if repeated or self._key not in _NAME_KEYS | _ARGUMENT_KEYS | _OTHER_KEYS:
                raise NotACall
            self._expect = ":"
        return []

    def _in_value(self, character: str) -> list[Piece]:
        if not self._buffer and character in SPACE:
            return []
        if not self._buffer:
            self._begin_value(character)
        belongs = self._value.take(character)
        pieces: list[Piece] = []
        if belongs:
            self._buffer += character
            pieces = self._more(character)
        if self._value.done:
            self._expect = ",}"
            pieces += self._end_value()
            if not belongs:
                pieces += self.feed(character)
        return pieces

    def _begin_value(self, character: str) -> None:
        if self._key in _NAME_KEYS:
            fits = character == '"'
        elif self._key in _ARGUMENT_KEYS:
            self._arguments = True
            fits = character in '{"n'
        else:
            fits = character not in "{[,}"
        if not fits:
            raise NotACall

    def _more(self, character: str) -> list[Piece]:
        if self._key in _NAME_KEYS and not self._value.done:
            written = self._buffer[1:]
            plain = "\\" not in written
            if plain and not any(name.startswith(written) for name in self._names):
                raise NotACall
        if self._key in _ARGUMENT_KEYS and self._buffer[0] == "{":
            if self.started:
                return [Arguments(character)]
            self._held.append(character)
            return self._start() if self._name else []
        return []

    def _end_value(self) -> list[Piece]:
        if self._key in _NAME_KEYS:
            self._name = _string(self._buffer)
            if self._name not in self._names:
                raise NotACall
            if not self._held:
                return []
            return self._start() + self._finish_call()
        if self._key not in _ARGUMENT_KEYS:
            return []
        if self._buffer[0] == '"':
            self._held.append(_string(self._buffer))
        elif self._buffer == "null":
            self._held.append("{}")
        elif self._buffer[0] != "{":
            raise NotACall
        if not self._name:
            return []
        return self._start() + self._finish_call()

    def _close(self) -> list[Piece]:
        """The object's end; a call may leave its arguments out."""
        if not self._name:
            raise NotACall
        self.closed = True
        if self.complete:
            return []
        self._held.append("{}")
        return self._start() + self._finish_call()

    def _start(self) -> list[Piece]:
        if self.started:
            return []
        self.started = True
        return [CallStarted(self._name), Arguments("".join(self._held))]

    def _finish_call(self) -> list[Piece]:
        self.complete = True
        return [CallDone()]


def _string(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value

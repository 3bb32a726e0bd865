"""What a parser makes of text: pieces that say what each stretch of it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a known tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the current call's arguments, JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The current call is complete."""


Piece: TypeAlias = Text | CallStarted | Arguments | CallDone


class ToolParser(Protocol):
    """Driven by characters: pieces joined depend on the whole text, never on how it was cut.

    Text is held back only while it can still become a call. A call that the text leaves open has
    no CallDone.
    """

    def feed(self, text: str) -> list[Piece]:
        """What the next characters of the answer make certain."""

    def finish(self) -> list[Piece]:
        """The answer has ended: what was held back, which is no call any more."""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of a kind as one piece, and none that is empty."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Text | Arguments) and not piece.text:
            continue
        if isinstance(piece, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            result[-1] = Arguments(last.text + piece.text)
        else:
            result.append(piece)
    return result

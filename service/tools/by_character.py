"""The part of a tool parser that does not depend on the format, where each character is a step."""

from abc import ABC, abstractmethod

from service.tools.pieces import CallDone, Piece, Text, joined


class CharacterParser(ABC):
    """A ToolParser by `_take`, which keeps in `_held` what is not yet known to be text, and says
    by `_called` that a call stood before it. Without `parallel`, what follows the first complete
    call is dropped."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._held = ""
        self._called = False
        self._mute = False

    def feed(self, text: str) -> list[Piece]:
        """See ToolParser."""
        pieces: list[Piece] = []
        for character in text:
            if self._mute:
                break
            pieces += self._take(character)
            self._mute = not self._parallel and CallDone() in pieces[-1:]
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """See ToolParser."""
        held, self._held = self._held, ""
        return joined([] if self._called and held.isspace() else [Text(held)])

    @abstractmethod
    def _take(self, character: str) -> list[Piece]:
        """What the next character makes certain."""

"""`ThinkSplitter`: what a model thinks, between its markers, apart from what it says."""

from enum import Enum, auto
from typing import Final

from engine.text import Vocabulary
from service.tools.json_call import SPACE

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class _State(Enum):
    START = auto()  # white space, then perhaps the opening marker
    THINKING = auto()
    AFTER = auto()  # white space after the closing marker
    SAYING = auto()


class ThinkSplitter:
    """Splits text into (thought, said), driven by characters.

    Thoughts stand at the beginning of the answer only. White space beside the markers belongs to
    neither; text is held back only while it can be part of that or of a marker.
    """

    def __init__(self, *, thinking: bool) -> None:
        """thinking: the prompt has opened the thoughts already."""
        self._state = _State.THINKING if thinking else _State.START
        self._thinking = thinking
        self._held = ""
        self._matched = 0  # how many characters of the closing marker end what is held
        self._begun = False

    @property
    def has_thought(self) -> bool:
        """Whether thoughts have begun."""
        return self._thinking

    def feed(self, text: str) -> tuple[str, str]:
        """What the next characters make certain."""
        thought: list[str] = []
        for index, character in enumerate(text):
            match self._state:
                case _State.SAYING:
                    return "".join(thought), text[index:]
                case _State.START:
                    self._held += character
                    if not self._may_open():
                        said, self._held, self._state = self._held, "", _State.SAYING
                        return "", said + text[index + 1 :]
                case _State.THINKING:
                    thought.append(self._think(character))
                case _State.AFTER if character not in SPACE:
                    self._state = _State.SAYING
                    return "".join(thought), text[index:]
                case _:
                    pass
        return "".join(thought), ""

    def finish(self) -> tuple[str, str]:
        """The answer has ended: what was held back."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return ("" if held.isspace() else held), ""
        return "", held

    def _may_open(self) -> bool:
        begin = self._held.lstrip(SPACE)
        if begin == OPEN:
            self._state, self._held = _State.THINKING, ""
            self._thinking = True
        return OPEN.startswith(begin)

    def _think(self, character: str) -> str:
        if character == CLOSE[self._matched]:
            self._held += character
            self._matched += 1
            if self._matched == len(CLOSE):
                self._state, self._held = _State.AFTER, ""
            return ""
        if self._matched:
            held, self._held, self._matched = self._held, "", 0
            self._begun = True
            return held + self._think(character)
        if character in SPACE:
            self._held += character if self._begun else ""
            return ""
        held, self._held = self._held, ""
        self._begun = True
        return held + character


class ThoughtCounter:
    """How many tokens from the first on are thoughts, if any are: up to the closing marker."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tail = b""
        self._ended = False
        self.num_tokens = 0

    def add(self, token_ids: list[int]) -> None:
        """The next tokens of the answer."""
        for token_id in token_ids:
            if self._ended:
                return
            self.num_tokens += 1
            self._tail += self._vocabulary.token_bytes(token_id)
            self._ended = CLOSE.encode() in self._tail
            self._tail = self._tail[1 - len(CLOSE) :]

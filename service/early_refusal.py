"""Under overload, most prompts are refused: before they are tokenised, where their length in
characters says enough."""

from typing import Final

from engine.api import Engine, EngineError
from engine.types import Prompt
from service.conversation import Conversation
from service.errors import from_engine

_FIRST_CHARACTERS: Final = 8.0
"""Of a token, before any text was seen; most texts have fewer."""
_MEMORY: Final = 0.05


class EarlyRefusal:
    """Knows how many characters tokens have here. Used from one event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._characters = _FIRST_CHARACTERS

    def check(self, num_characters: int, tenant: str, weight: float, priority: int) -> None:
        """Raises ApiError as `Engine.generate` would, for a prompt of so many characters."""
        num_tokens = max(1, int(num_characters / self._characters))
        try:
            self._engine.check_load(Prompt(tenant, weight, priority, num_tokens))
        except EngineError as error:
            raise from_engine(error) from error

    def learn(self, num_characters: int, num_tokens: int) -> None:
        """So many characters had so many tokens."""
        if num_characters and num_tokens:
            self._characters += _MEMORY * (num_characters / num_tokens - self._characters)


def num_characters(conversation: Conversation) -> int:
    """At least so many has what the conversation renders to."""
    return sum(len(message.text) for message in conversation.messages)

"""What a model's text side is: tokenizer, vocabulary, chat template, end tokens."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from engine.text.encoder import Encoder
from engine.text.vocabulary import Vocabulary


class TextError(ValueError):
    """A model's tokenizer or template cannot be used; the message names the file and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class TextAssets:
    """Everything between text and token ids for one model; nothing in it changes after loading.

    path:          where it was read from, for messages.
    encoder:       the way to tokenise: exact, and never holds the interpreter for long.
    bos_token:     its text, "" where the model has none; likewise eos_token.
    eos_token_ids: every token that ends a turn.
    add_bos:       whether text without a template begins with the BOS token
                   (`Encoder.encode(..., add_special_tokens=True)` puts it there).
    """

    path: Path
    tokenizer: Tokenizer
    encoder: Encoder
    vocabulary: Vocabulary
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_token_ids: frozenset[int]
    add_bos: bool

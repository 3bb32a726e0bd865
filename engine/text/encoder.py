"""Text to token ids, in slices, so that no call holds the interpreter for long."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.text.pre_tokenizers import SAFE_CUT, cuts_are_safe

SLICE_CHARACTERS: Final = 16_384
"""About 4,000 tokens: a few milliseconds of tokenising without the interpreter lock."""

_CUT_WINDOW: Final = 16_384
_IDS_AT_ONCE: Final = 16_384
"""A list of more would hold the interpreter for too long."""


class Encoder:
    """Tokenises long texts slice by slice, with the very ids of one call over the whole text.

    `Tokenizer.encode` holds the interpreter lock from begin to end; `encode_batch_fast` drops it,
    but still makes its Python lists under it: slices keep those short, and what the library calls
    truncation, which is made without the lock, parts the ids of a slice that became long. A text
    is cut only where the pre-tokenizer splits in any context (`pre_tokenizers`); with a tokenizer
    of which that is not known, the text is one slice.
    """

    __slots__ = ("_prefix", "_slice_characters", "_sliceable", "_suffix", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, slice_characters: int = SLICE_CHARACTERS) -> None:
        """Sets the tokenizer's truncation: encodings have their ids in parts from then on. Raises
        ValueError when special tokens are not simply put before and after the text."""
        tokenizer.enable_truncation(_IDS_AT_ONCE)
        self._tokenizer = tokenizer
        self._slice_characters = slice_characters
        self._sliceable = cuts_are_safe(tokenizer)
        text: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
        starts = range(len(full) - len(text) + 1)
        start = next((i for i in starts if full[i : i + len(text)] == text), None)
        if start is None:
            raise ValueError("its post-processor does more than add tokens before and after")
        self._prefix = full[:start]
        self._suffix = full[start + len(text) :]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The special tokens put before a text, usually BOS or none."""
        return tuple(self._prefix)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> NDArray[np.int32]:
        """Token ids, shape [num_tokens], int32. May be called from several threads.

        Text of special tokens becomes these tokens. Raises UnicodeEncodeError where the text has
        lone surrogates, RuntimeError where the library gives up on it.
        """
        prefix, suffix = (self._prefix, self._suffix) if add_special_tokens else ([], [])
        parts = [np.array(prefix, dtype=np.int32)]
        for piece in self.slices(text):
            piece.encode()  # for a lone surrogate the library would raise a bare TypeError
            parts.append(self._ids(piece))
        parts.append(np.array(suffix, dtype=np.int32))
        return np.concatenate(parts)

    def _ids(self, piece: str) -> NDArray[np.int32]:
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
        except BaseException as error:
            # A panic of the library, which some texts make of some patterns, is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise RuntimeError(f"the tokenizer failed: {error}") from error
        parts = (encoding, *encoding.overflowing)
        return np.concatenate([np.array(part.ids, dtype=np.int32) for part in parts])

    def slices(self, text: str) -> Iterator[str]:
        """The pieces of the text that `encode` tokenises one by one; joined they are the text."""
        if not self._sliceable:
            yield text
            return
        start = 0
        while start < len(text):
            end = _next_cut(text, start + self._slice_characters)
            yield text[start:end]
            start = end


def _next_cut(text: str, position: int) -> int:
    """The first safe cut at or after `position`, else the end; looked for in short calls."""
    while position < len(text):
        if found := SAFE_CUT.search(text, position, position + _CUT_WINDOW):
            return found.start()
        position += _CUT_WINDOW
    return len(text)

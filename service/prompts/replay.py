"""Token ids that were computed before, in place of new ones for the same text.

A model's own words, tokenised again, are often other tokens than it chose, and none of these is
cached. Where a rendered text begins as a former prompt and its answer read, their ids are taken
over; only what follows is tokenised.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.text import Vocabulary

TokenIds = NDArray[np.int32]


class TokenReplay:
    """Splices former token ids. Threads may use it at the same time.

    Former and new ids meet at an added special token: tokenizers cut a text there before all
    else, so what follows gets the ids that it gets in the whole text.
    """

    __slots__ = ("_encode", "_num_bytes", "_special_ids", "_vocabulary")

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, encode: Callable[[str], TokenIds]
    ) -> None:
        """`encode` gives the ids of a text in which special tokens are recognised."""
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = np.array(
            [token_id for token_id, token in added.items() if token.special], dtype=np.int32
        )
        self._vocabulary = vocabulary
        sizes = [len(vocabulary.token_bytes(each)) for each in range(vocabulary.size)]
        self._num_bytes = np.array([*sizes, 0], dtype=np.int64)  # the last for padded ids
        self._encode = encode

    def splice(self, text: bytes, former: TokenIds) -> tuple[TokenIds, int]:
        """Ids of a text that may begin with the text of `former`, and how many of them are former
        ones; 0 where nothing fits and all of the text was tokenised.

        The ids stand for the same bytes as the ids of the text tokenised alone.
        """
        known = self._vocabulary.join(former.tolist())
        if known and text.startswith(known):
            tail = self._special_tail(text[len(known) :])
            if tail is not None:
                return np.concatenate([former, tail]), len(former)
        ends = np.cumsum(self._num_bytes[np.minimum(former, len(self._num_bytes) - 1)])
        same = _common_length(text, known)
        fits = np.isin(former, self._special_ids) & (ends <= same)
        if not fits.any():
            return self._encode(text.decode()), 0
        last = int(np.flatnonzero(fits)[-1])
        start = int(ends[last]) - int(self._num_bytes[former[last]])
        tail = self._encode(text[start:].decode())
        if tail[0] != former[last]:
            return self._encode(text.decode()), 0
        return np.concatenate([former[:last], tail]), last + 1

    def _special_tail(self, text: bytes) -> TokenIds | None:
        """Ids of a text that begins with a special token; None for one that does not."""
        specials = (self._vocabulary.token_bytes(token_id) for token_id in self._special_ids)
        if not text.startswith(tuple(specials)):
            return None
        tail = self._encode(text.decode())
        return tail if tail[0] in self._special_ids else None


def _common_length(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right))
    a, b = np.frombuffer(left, np.uint8, length), np.frombuffer(right, np.uint8, length)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length

"""What a request is likely to say next, and how likely: its own tokens repeated."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from engine.speculation.ngram_index import MIN_MATCH, NgramIndex
from kernels.contract import Int32Array

_STEPS: Final = (MIN_MATCH, 4, 6, 10, 18)
"""Matches of about as many tokens are right about as often: from each of these on."""
_FIRST_CHANCES: Final = (0.3, 0.4, 0.5, 0.6, 0.7)
_MEMORY: Final = 1 / 8
"""How much one token changes what is expected of the next."""


class Drafter:
    """Follows one request's tokens. While they run along with an earlier place, what stood behind
    that place is what will be said next; where they part, the longest match is looked up again
    (Saxena, Prompt Lookup Decoding, 2023).

    Every token is compared with the one expected, whether or not a step had computed it as a
    draft: how often such guesses are right is learned without a cost, also while they do not pay.
    """

    def __init__(self, prompt: Int32Array, prediction: Int32Array | None = None) -> None:
        """`prediction` is what the caller expects to be said: it stands before the prompt here,
        and is followed from its beginning until it is wrong."""
        given = prompt[:0] if prediction is None else prediction
        self._num_given = given.size
        self._index = NgramIndex(np.concatenate([given, prompt]))
        self._next = 0 if given.size else -1
        """Where in the index the expected token stands; -1 without a match."""
        self._length = _STEPS[-1]
        self._chances = list(_FIRST_CHANCES)

    def follow(self, token_ids: Int32Array) -> None:
        """Take in what was added to the sequence since."""
        index = self._index
        for token_id in token_ids[len(index.tokens) - self._num_given :].tolist():
            if self._next >= 0:
                self._judge(index.tokens[self._next] == token_id)
            index.append(token_id)

    @property
    def has_draft(self) -> bool:
        """Whether the last tokens stood somewhere before."""
        return self._find()

    def draft(self, count: int) -> tuple[int, ...]:
        """The `count` tokens that are expected next, none without a match. A match that reaches
        the end of the sequence goes on with what it has drafted."""
        if not self._find():
            return ()
        tokens, period = self._index.tokens, len(self._index.tokens) - self._next
        return tuple(tokens[self._next + i % period] for i in range(count))

    def chances(self) -> Iterator[float]:
        """How likely each draft is right, once the ones before it are; empty without a match."""
        if self._find():
            length = self._length
            while True:
                yield self._chances[_step(length)]
                length += 1

    def _find(self) -> bool:
        if self._next < 0:
            match = self._index.longest_match()
            if not match.length:
                return False
            self._next, self._length = match.end, match.length
        return True

    def _judge(self, right: bool) -> None:
        step = _step(self._length)
        self._chances[step] += _MEMORY * (right - self._chances[step])
        if right:
            self._next += 1
            self._length += 1
        else:
            self._next, self._length = -1, 0


def _step(length: int) -> int:
    step = len(_STEPS) - 1
    while length < _STEPS[step]:
        step -= 1
    return step

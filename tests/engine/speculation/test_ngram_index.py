"""The index against a search of the whole sequence."""

import random
from array import array

import numpy as np
import pytest

from engine.speculation.ngram_index import (
    MAX_CANDIDATES,
    MAX_MATCH,
    MIN_MATCH,
    Match,
    NgramIndex,
)


def plain_match(tokens: list[int]) -> Match:
    """By its definition: every earlier place, the latest first."""
    best, seen = Match(0, 0), 0
    for end in range(len(tokens) - 1, MIN_MATCH - 1, -1):
        most = min(end, MAX_MATCH)
        length = next(
            (i for i in range(most) if tokens[end - 1 - i] != tokens[len(tokens) - 1 - i]), most
        )
        if length >= MIN_MATCH:
            seen += 1
            best = Match(end, length) if length > best.length else best
        if seen == MAX_CANDIDATES:
            break
    return best


def index_of(tokens: list[int]) -> NgramIndex:
    return NgramIndex(np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize("vocab", [1, 2, 3, 10, 50000])
@pytest.mark.parametrize("given", [0, 1, 2, 3, 40])
def test_matches_are_those_of_a_plain_search(vocab: int, given: int) -> None:
    rng = random.Random(vocab * 100 + given)
    tokens = [rng.randrange(vocab) for _ in range(given)]
    index = index_of(tokens)
    for _ in range(150):
        assert index.longest_match() == plain_match(tokens)
        if len(tokens) > 20 and rng.random() < 0.1:
            start = rng.randrange(len(tokens) - 10)
            more = tokens[start : start + rng.randrange(2, 10)]
        else:
            more = [rng.randrange(vocab)]
        for token_id in more:
            index.append(token_id)
        tokens += more
    assert list(index.tokens) == tokens


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 1000])
def test_a_prompt_taken_in_at_once_is_as_one_that_came_token_by_token(length: int) -> None:
    rng = random.Random(length)
    tokens = [rng.randrange(4) * 12345 for _ in range(length)]
    whole, grown = index_of(tokens), index_of([])
    for token_id in tokens:
        grown.append(token_id)
    for _ in range(100):
        assert whole.longest_match() == grown.longest_match()
        token_id = rng.randrange(4) * 12345
        whole.append(token_id)
        grown.append(token_id)


def test_what_a_match_costs_does_not_grow_with_the_sequence() -> None:
    """Counted in tokens looked at."""
    looks = 0

    class Counting(array):  # type: ignore[type-arg]
        def __getitem__(self, place: int) -> int:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return int(super().__getitem__(place))

    most = []
    for length in (1_000, 100_000):
        index = index_of([7, 8, 9] * (length // 3))
        index.tokens = Counting("i", index.tokens)
        looks = 0
        for token_id in [7, 8, 9] * 10:
            index.append(token_id)
            index.longest_match()
        most.append(looks)
    assert most[0] == most[1] <= 30 * (2 * MAX_CANDIDATES * MAX_MATCH)

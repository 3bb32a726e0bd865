"""What is drafted, and how likely it is held to be."""

import random
from itertools import islice

import numpy as np

from engine.speculation.drafter import Drafter
from engine.speculation.ngram_index import MAX_MATCH, MIN_MATCH
from tests.engine.speculation.test_ngram_index import plain_match


def drafter_of(tokens: list[int]) -> Drafter:
    return Drafter(np.array(tokens, dtype=np.int32))


def follow(drafter: Drafter, tokens: list[int]) -> None:
    drafter.follow(np.array(tokens, dtype=np.int32))


def test_a_draft_is_what_stood_behind_the_longest_match() -> None:
    rng = random.Random(3)
    for seed in range(30):
        tokens = [rng.randrange(2 + seed) for _ in range(rng.randrange(60))]
        drafter = drafter_of(tokens)
        for _ in range(60):
            match = plain_match(tokens)
            draft = drafter.draft(4)
            assert len(draft) == (4 if match.length else 0)
            if draft:
                ends = [
                    end
                    for end in range(MIN_MATCH, len(tokens))
                    if tokens[max(0, end - match.length) : end] == tokens[-match.length :]
                    and [*tokens[end:], *draft][:4] == [*draft]
                ]
                assert match.length == MAX_MATCH or ends
            tokens.append(rng.choice([rng.randrange(2 + seed), *draft[:1]]))
            follow(drafter, tokens)


def test_a_loop_is_drafted_beyond_the_end_of_what_was_said() -> None:
    drafter = drafter_of([9, 8, 1, 2, 3, 1, 2, 3, 1])
    assert drafter.draft(7) == (2, 3, 1, 2, 3, 1, 2)


def test_without_a_match_there_is_no_draft() -> None:
    for tokens in ([], [1], [1, 2], [1, 1], list(range(100))):
        drafter = drafter_of(tokens)
        assert drafter.draft(5) == ()
        assert list(drafter.chances()) == []


def chance(drafter: Drafter) -> float:
    return next(iter(drafter.chances()))


def test_chances_are_learned_from_what_comes_though_nothing_was_computed() -> None:
    phrase = [11, 12, 13, 14]
    right = drafter_of(tokens := [*phrase, 0, *phrase])
    first = chance(right)
    for turn in range(1, 30):
        for token_id in (0, *phrase):
            tokens.append(token_id)
            follow(right, tokens)
            right.draft(1)
        tokens.append(100 + turn)  # so that no match is longer than the phrase
        follow(right, tokens)
        tokens += phrase
        follow(right, tokens)
    assert chance(right) > first
    wrong = drafter_of(tokens := list(phrase))
    for turn in range(30):
        tokens += [1000 + turn, *phrase]
        follow(wrong, tokens)
        wrong.draft(1)
    assert chance(wrong) < first / 4


def test_a_longer_match_is_trusted_more_at_first() -> None:
    drafter = drafter_of([*range(20), *range(MIN_MATCH)])
    chances = list(islice(drafter.chances(), 20))
    assert chances == sorted(chances)
    assert chances[-1] > chances[0]


def test_following_in_pieces_or_at_once_is_the_same() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(3) for _ in range(200)]
    one = drafter_of(tokens[:50])
    other = drafter_of(tokens[:50])
    for end in range(51, 201):
        follow(one, tokens[:end])
    follow(other, tokens)
    assert one.draft(6) == other.draft(6) == drafter_of(tokens).draft(6)


def test_a_prediction_is_followed_from_its_beginning_and_found_again() -> None:
    prediction = list(range(50, 80))
    drafter = Drafter(np.arange(10, dtype=np.int32), np.array(prediction, dtype=np.int32))
    tokens = list(range(10))
    assert drafter.draft(3) == (50, 51, 52)
    for token_id in (50, 51, 52, 7):  # it goes another way,
        tokens.append(token_id)
        follow(drafter, tokens)
    assert drafter.draft(2) == ()
    tokens += [60, 61, 62]  # and comes back
    follow(drafter, tokens)
    assert drafter.draft(2) == (63, 64)

"""What ends a request, and which bytes it may show."""

import numpy as np
import pytest

from engine.scheduling.output import Outcome, OutputRules
from engine.scheduling.request import Request
from engine.text import Vocabulary
from engine.types import EngineRequest, FinishReason, SamplingParams, pack_tokens
from prefix_cache.key import Namespace

PIECES = (b"AB", b"C", b"DEF", b"GH", b"IJ", b"<end>", b"<tool>", b"\xf0\x9f", b"\x98\xb8")
RULES = OutputRules(Vocabulary(PIECES, {5, 6}), frozenset({5}))


def outcomes(tokens: list[int], sampling: SamplingParams, max_context: int = 99) -> list[Outcome]:
    wire = EngineRequest("r", pack_tokens([0, 1]), sampling)
    request = Request(
        wire,
        np.array([0, 1], dtype=np.int32),
        Namespace("m", "n", "f16", "t"),
        arrival=1,
        now_ns=0,
        max_context=max_context,
    )
    taken = []
    for token in tokens:
        taken.append(RULES.take(request, token))
        if taken[-1].reason:
            break
    assert request.num_output_tokens == len(taken)
    return taken


def text(taken: list[Outcome]) -> bytes:
    return b"".join(outcome.text for outcome in taken)


def test_eos_counts_and_shows_nothing() -> None:
    taken = outcomes([0, 5, 1], SamplingParams(10))
    assert taken == [Outcome(b"AB"), Outcome(b"", FinishReason.STOP, stop_token_id=5)]


def test_ignored_eos_goes_on_and_shows_nothing() -> None:
    taken = outcomes([0, 5, 1], SamplingParams(3, ignore_eos=True))
    assert [o.text for o in taken] == [b"AB", b"", b"C"]
    assert taken[-1].reason is FinishReason.LENGTH


def test_a_stop_token_even_where_eos_is_ignored() -> None:
    for stop in (3, 5, 6):
        sampling = SamplingParams(9, stop_token_ids=(stop,), ignore_eos=True)
        taken = outcomes([0, stop, 1], sampling)
        assert taken[-1] == Outcome(b"", FinishReason.STOP, stop_token_id=stop)
        assert text(taken) == b"AB"


@pytest.mark.parametrize("special", [6])
def test_special_tokens_show_nothing(special: int) -> None:
    assert text(outcomes([0, special, 1], SamplingParams(3))) == b"ABC"


def test_a_stop_string_across_tokens_leaks_nothing() -> None:
    taken = outcomes([0, 1, 2, 3, 4], SamplingParams(10, stop=(b"DEFGHIJ",)))
    assert text(taken) == b"ABC"
    assert taken[-1].reason is FinishReason.STOP
    assert (taken[-1].stop, taken[-1].stop_token_id) == (b"DEFGHIJ", -1)


def test_what_could_have_been_a_stop_is_shown_at_the_end() -> None:
    taken = outcomes([0, 1, 2, 3, 4], SamplingParams(5, stop=(b"DEFGHIK",)))
    assert [o.text for o in taken] == [b"AB", b"C", b"", b"", b"DEFGHIJ"]
    assert taken[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("last", [5, 3])
def test_held_bytes_are_shown_when_a_token_ends_it(last: int) -> None:
    taken = outcomes([2, last], SamplingParams(5, stop=(b"EFX",), stop_token_ids=(3,)))
    assert text(taken) == b"DEF"
    assert taken[-1].reason is FinishReason.STOP


def test_a_stop_in_the_last_token_wins_over_the_length() -> None:
    taken = outcomes([0, 1], SamplingParams(2, stop=(b"BC",)))
    assert (text(taken), taken[-1].reason) == (b"A", FinishReason.STOP)


def test_what_ended_it_may_be_shown() -> None:
    shown = SamplingParams(9, stop=(b"CD",), stop_token_ids=(3,), include_stop=True)
    taken = outcomes([0, 1, 2], shown)
    assert (text(taken), taken[-1].stop) == (b"ABCD", b"CD")
    taken = outcomes([2, 3], shown)
    assert text(taken).startswith(b"DEF") and len(text(taken)) > 3
    assert taken[-1].stop_token_id == 3


def test_stop_strings_count_after_the_least_number_of_tokens() -> None:
    taken = outcomes([1, 1, 1, 1], SamplingParams(9, stop=(b"C",), min_tokens=2))
    assert len(taken) == 3
    assert (text(taken), taken[-1].stop) == (b"CC", b"C")


def test_bytes_are_not_characters() -> None:
    assert [o.text for o in outcomes([7, 8], SamplingParams(2))] == [b"\xf0\x9f", b"\x98\xb8"]


@pytest.mark.parametrize(("max_tokens", "context", "expected"), [(3, 99, 3), (9, 6, 4), (4, 6, 4)])
def test_length(max_tokens: int, context: int, expected: int) -> None:
    taken = outcomes([1] * 20, SamplingParams(max_tokens), max_context=context)
    assert len(taken) == expected
    assert taken[-1].reason is FinishReason.LENGTH


def test_an_id_beyond_the_vocabulary_has_no_bytes() -> None:
    assert text(outcomes([0, 400, 1], SamplingParams(3))) == b"ABC"


def test_a_special_token_shows_its_text_where_the_request_asks_for_it() -> None:
    request = Request(
        EngineRequest("r", pack_tokens([0]), SamplingParams(9), shown_token_ids=(6,)),
        np.array([0], dtype=np.int32),
        Namespace("m", "n", "f16", "t"),
        arrival=1,
        now_ns=0,
        max_context=99,
    )
    assert RULES.take(request, 6).text == PIECES[6]
    assert text(outcomes([6, 0], SamplingParams(2))) == PIECES[0]

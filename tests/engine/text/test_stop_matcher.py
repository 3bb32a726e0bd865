"""Stop strings over bytes; see vllm-project/vllm#3574 for the kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import StopMatcher

ALPHABET = st.sampled_from(b"ab")
STOPS = st.lists(st.lists(ALPHABET, min_size=1, max_size=5).map(bytes), max_size=4).map(tuple)
PIECES = st.lists(st.lists(ALPHABET, max_size=4).map(bytes), max_size=12)


def reference(stops: tuple[bytes, ...], stream: bytes) -> tuple[bytes, bytes | None]:
    """The first end wins, then the longest, by trying every end."""
    for end in range(len(stream) + 1):
        found = [stop for stop in stops if stream[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return stream[: end - len(stop)], stop
    return stream, None


def longest_live_prefix(stops: tuple[bytes, ...], stream: bytes) -> int:
    """Length of the longest suffix of the stream that is a proper prefix of some stop."""
    return max(
        (n for stop in stops for n in range(len(stop)) if stream.endswith(stop[:n])), default=0
    )


@given(STOPS, PIECES)
def test_any_grouping_gives_the_first_match_and_holds_no_byte_too_many(
    stops: tuple[bytes, ...], pieces: list[bytes]
) -> None:
    matcher = StopMatcher(stops)
    stream = released = b""
    for piece in pieces:
        stream += piece
        text, stop = matcher.feed(piece)
        released += text
        expected, matched = reference(stops, stream)
        assert stop == matcher.matched == matched
        if matched is None:
            assert released == stream[: len(stream) - longest_live_prefix(stops, stream)]
        else:
            assert released == expected
    released += matcher.flush()
    assert released == reference(stops, stream)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_a_stop_across_tokens_leaks_nothing(size: int) -> None:
    text = b"ABCDEFGHIJ"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    matcher = StopMatcher((b"DEFGHIJ",))
    results = [matcher.feed(piece) for piece in pieces]
    assert b"".join(released for released, _ in results) == b"ABC"
    assert results[-1][1] == b"DEFGHIJ"
    assert matcher.flush() == b""


def test_a_stop_that_does_not_come_delivers_everything() -> None:
    matcher = StopMatcher((b"DEFGHIK",))
    released = [matcher.feed(bytes((byte,)))[0] for byte in b"ABCDEFGHIJ"]
    assert released == [b"A", b"B", b"C", b"", b"", b"", b"", b"", b"", b"DEFGHIJ"]
    assert matcher.flush() == b""


def test_what_is_held_comes_with_the_flush() -> None:
    matcher = StopMatcher((b"\nUser:",))
    assert matcher.feed(b"bye\nUse") == (b"bye", None)
    assert matcher.flush() == b"\nUse"


def test_a_stop_inside_a_token_drops_what_follows_it() -> None:
    matcher = StopMatcher((b"<end>",))
    assert matcher.feed(b"answer<end>rest") == (b"answer", b"<end>")
    assert matcher.feed(b"more") == (b"", b"<end>")
    assert matcher.flush() == b""


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert StopMatcher((b"c", b"abc", b"bc")).feed(b"xabc") == (b"x", b"abc")


def test_the_stop_that_ends_first_wins_over_one_that_begins_first() -> None:
    assert StopMatcher((b"abcd", b"bc")).feed(b"xabcd") == (b"xa", b"bc")


def test_a_stop_may_end_within_a_code_point_of_several_bytes() -> None:
    cat = "😸".encode()
    matcher = StopMatcher((cat,))
    assert [matcher.feed(cat[:2]), matcher.feed(cat[2:])] == [(b"", None), (b"", cat)]


def test_no_stops_release_everything_at_once() -> None:
    assert StopMatcher(()).feed(b"text") == (b"text", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher((b"a", b""))

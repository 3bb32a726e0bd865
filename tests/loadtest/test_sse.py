"""The event reader gives the same events however the stream was cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadtest.transports.sse import SseParser

STREAM = (
    b": hello\n\n"
    b'event: a\r\ndata: {"x":1}\r\n\r\n'
    b"data:two\n\n"
    b"id: 7\n\n"
    b"data: first\ndata: second\n\n"
    b"event: b\rdata: three\r\r"
    b"data: [DONE]\n\n"
    b"data: never ended"
)
EVENTS = [b'{"x":1}', b"two", b"first\nsecond", b"three", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    events = []
    for start, end in itertools.pairwise(places):
        events += list(parser.feed(STREAM[start:end]))
    assert events == EVENTS

"""UTF-8 assembly; see ggml-org/llama.cpp#28926 for the kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import Utf8Assembler

VALID = "😸 👩‍👩‍👧‍👦 e\u0301 naïve 日本語 \ufffd \x00"
INVALID = (
    b"\xf0\x9f\x98\xb8 \xff \xc3( \xe2\x82 \xed\xa0\x80 \xf0\x80\x80\x80 \xf4\x90\x80\x80 \x80"
)


@pytest.mark.parametrize("data", [VALID.encode(), INVALID], ids=["valid", "invalid"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_joined_are_one_decode(data: bytes, size: int) -> None:
    assembler = Utf8Assembler()
    pieces = [assembler.feed(data[at : at + size]) for at in range(0, len(data), size)]
    pieces.append(assembler.finish())
    assert "".join(pieces) == data.decode(errors="replace")


@given(st.lists(st.binary(max_size=5)))
def test_pieces_of_any_bytes_joined_are_one_decode(pieces: list[bytes]) -> None:
    assembler = Utf8Assembler()
    text = "".join([*map(assembler.feed, pieces), assembler.finish()])
    assert text == b"".join(pieces).decode(errors="replace")


def test_an_incomplete_code_point_waits() -> None:
    assembler = Utf8Assembler()
    assert [assembler.feed(bytes((byte,))) for byte in "😸".encode()] == ["", "", "", "😸"]
    assert assembler.finish() == ""


def test_the_end_within_a_code_point_is_one_replacement() -> None:
    assembler = Utf8Assembler()
    assert assembler.feed(b"a\xf0\x9f\x98") == "a"
    assert assembler.finish() == "\ufffd"
    assert assembler.feed(b"b") == "b"

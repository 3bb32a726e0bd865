"""msgspec's errors become the path of the field that is wrong."""

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from service.dialects import wire
from service.errors import ApiError, openai_error


class Leaf(msgspec.Struct):
    number: Annotated[int, Meta(ge=1, le=9)]


class Tree(msgspec.Struct):
    leaves: list[Leaf] = []
    words: Annotated[list[Annotated[str, Meta(min_length=2)]], Meta(max_length=2)] = []
    by_name: dict[str, int] = {}
    by_key: dict[Annotated[str, Meta(max_length=2)], int] = {}


def refused(data: bytes | str | msgspec.Raw, path: str = "") -> ApiError:
    with pytest.raises(ApiError) as error:
        wire.decode(data, Tree, path)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    ("data", "param", "code", "words"),
    [
        ('{"leaves":[{"number":1},{}]}', "leaves[1].number", "missing_required_parameter", ""),
        ('{"leaves":[{"number":0}]}', "leaves[0].number", "invalid_value", "at least 1"),
        ('{"leaves":[{"number":10}]}', "leaves[0].number", "invalid_value", "at most 9"),
        ('{"leaves":[{"number":"1"}]}', "leaves[0].number", "invalid_type", "expected int"),
        ('{"leaves":{}}', "leaves", "invalid_type", "got object"),
        ('{"words":["ab","ab","ab"]}', "words", "invalid_value", "at most 2 items"),
        ('{"words":["a"]}', "words[0]", "invalid_value", "at least 2 characters"),
        ('{"by_name":{"x":"y"}}', "by_name[...]", "invalid_type", "got str"),
        ('{"by_key":{"long":1}}', "by_key", "invalid_value", "at most 2 characters"),
        ("[]", None, "invalid_type", "body"),
        ("{", None, "invalid_json", "JSON"),
        ('{"x":' + "[" * 50_000, None, "invalid_json", "deeply"),
    ],
)
def test_paths_codes_and_words(data: str, param: str | None, code: str, words: str) -> None:
    error = refused(data)
    assert (error.param, error.code) == (param, code)
    assert words in error.message


def test_a_part_of_a_body_is_named_from_the_whole() -> None:
    assert refused('{"leaves":[{}]}', "input[3]").param == "input[3].leaves[0].number"
    assert refused(msgspec.Raw(b"7"), "input[3]").param == "input[3]"


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_depth_is_bounded_exactly() -> None:
    wire.require_shallow(nested(wire.MAX_JSON_DEPTH - 1), "tools[0]")
    with pytest.raises(ApiError) as error:
        wire.require_shallow(nested(wire.MAX_JSON_DEPTH), "tools[0]")
    assert error.value.param == "tools[0]"


def test_the_error_object() -> None:
    error = ApiError(400, "No.", code="c", param="p")
    assert msgspec.json.decode(openai_error(error)) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": "p", "code": "c"}
    }


@pytest.mark.parametrize(
    "piece", [b"[]", b"{}", b'"a"', b'{"a":1}', b'["[["]', b'"\\""', b'"\\\\"']
)
def test_a_body_of_too_many_values_is_refused_before_it_is_read(piece: bytes) -> None:
    wire.require_few_values(b"[" + b",".join([piece] * 24_000) + b"]")
    with pytest.raises(ApiError) as error:
        wire.require_few_values(b"[" + b",".join([piece] * 50_000) + b"]")
    assert (error.value.status, error.value.code) == (400, "invalid_value")
    assert "50000" in error.value.message


@pytest.mark.parametrize("text", ["[" * 200_000, '\\"{' * 100_000, "a, b; " * 50_000])
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    wire.require_few_values(msgspec.json.encode({"messages": [{"content": text}]}))


def test_numbers_and_larger_bodies_may_be_more() -> None:
    wire.require_few_values(b"[" + b"12," * 300_000 + b"1]")
    wire.require_few_values(b"[" + b'"%b",' % (b"x" * 30) * 100_000 + b"1]")


def test_free_form_json_of_too_many_values_is_refused() -> None:
    wire.require_shallow({"a": [1] * (wire.MAX_VALUES - 1)}, "x")
    with pytest.raises(ApiError) as error:
        wire.require_shallow({"a": [1] * wire.MAX_VALUES}, "x.y")
    assert error.value.param == "x.y"


@pytest.mark.parametrize(
    ("text", "half", "at"),
    [
        ('{"a":"\\ud83d"}', "\\ud83d", 6),
        ('{"a":"x\\uDE00 y"}', "\\uDE00", 7),
        ('{"a":"\\ud83d\\u0041"}', "\\ud83d", 6),
        ('{"a":"\\ud83d\\ude00\\ud83d z"}', "\\ud83d", 18),
        ('{"a":"\\\\\\ud83d"}', "\\ud83d", 8),
    ],
)
def test_half_a_character_is_named_with_its_place(text: str, half: str, at: int) -> None:
    with pytest.raises(ApiError) as error:
        wire.decode(text.encode(), dict[str, str])
    assert (error.value.status, error.value.code) == (400, "invalid_json")
    assert f"{half} at byte {at} is half a character" in error.value.message


def test_what_only_looks_like_half_a_character_is_not_blamed() -> None:
    text = '{"a":"\\\\ud83d","b":"\\ud83d\\ude00"}'
    assert wire.decode(text, dict[str, str]) == {"a": "\\ud83d", "b": "\U0001f600"}
    with pytest.raises(ApiError, match="not valid JSON"):
        wire.decode(text[:-1], dict[str, str])

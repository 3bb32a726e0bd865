"""Every tool format: the same calls for every grouping of bytes; what is no call is text.

The kinds of vllm-project/vllm#55082, #39615, #47907, #17703 and #46308.
"""

import json

import pytest

from service.tools.formats import FormatName, format_of
from service.tools.pieces import Arguments, CallDone, CallStarted, Piece, Text
from tests.service.tools.splits import read, splits

NAMES = ("weather", "add")
CITY = '{"city":"Münster","note":"日本 😀 } \\" {"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'


def call(name: str, arguments: str) -> list[Piece]:
    return [CallStarted(name), Arguments(arguments), CallDone()]


CASES: list[tuple[FormatName, str, list[Piece]]] = [
    ("hermes", HERMES, call("weather", CITY)),
    (
        "hermes",
        (
            f"Let me see.\n{HERMES}\n"
            '<tool_call>{"arguments": {"a": [1]}, "name": "add"}</tool_call>\n'
        ),
        [Text("Let me see."), *call("weather", CITY), *call("add", '{"a": [1]}')],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name":"add"}]</tool_call> ok',
        [*call("add", '{"a": 1}'), *call("add", "{}"), Text(" ok")],
    ),
    ("generic", f'{{"name": "weather", "arguments": {CITY}}}', call("weather", CITY)),
    ("generic", f"I call: {HERMES}", [Text("I call:"), *call("weather", CITY)]),
    (
        "llama",
        f'{{"name": "weather", "parameters": {CITY}}}; {{"name": "add", "parameters": {{}}}}',
        [*call("weather", CITY), *call("add", "{}")],
    ),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
        call("add", '{"a": 1}'),
    ),
    (
        "mistral",
        (
            f'[TOOL_CALLS][{{"name": "weather", "arguments": {CITY}}}, '
            '{"name": "add", "arguments": null}]'
        ),
        [*call("weather", CITY), *call("add", "{}")],
    ),
    (
        "mistral-args",
        f'Hm. [TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]add[CALL_ID]a1B2[ARGS] {{"a": 1}}\n',
        [Text("Hm."), *call("weather", CITY), *call("add", '{"a": 1}')],
    ),
    (
        "mistral-args",
        "[TOOL_CALLS]add[ARGS]{} and [TOOL_CALLS]sub[ARGS]{}",
        [*call("add", "{}"), Text(" and [TOOL_CALLS]sub[ARGS]{}")],
    ),
    (
        "pythonic",
        '[weather(city=\'Mün"ster\', note="日本 😀", l=[1, (True, None)]), add(a=-1.5, b=.5)]',
        [
            *call("weather", '{"city": "Mün\\"ster", "note": "日本 😀", "l": [1, [true, null]]}'),
            *call("add", '{"a": -1.5, "b": 0.5}'),
        ],
    ),
]

TEXTS: list[tuple[FormatName, str]] = [
    ("hermes", "a < b, <tool_call> is a marker, <tool_call>{no}"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weath'),
    ("hermes", f'{{"name": "weather", "arguments": {CITY}}}'),
    ("generic", '{"answer": 42}'),
    ("llama", 'Here: {"name": "add", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] none  "),
    ("mistral-args", "[TOOL_CALLS]weather[ARGS] none, [TOOL_CALLS] neither"),
    ("mistral-args", "[TOOL_CALLS]weather[CALL_ID]" + "x" * 200),
    ("mistral-args", "a [TOOL_[TOOL_CALLS]add[ARG"),
    ("pythonic", "[1] is a footnote"),
    ("pythonic", "[weather(1)]"),
]


@pytest.mark.parametrize(("name", "text", "pieces"), CASES)
def test_calls_are_the_same_for_every_grouping(
    name: FormatName, text: str, pieces: list[Piece]
) -> None:
    for parts in splits(text.encode()):
        assert read(format_of(None, name).parser(NAMES, parallel=True), parts) == pieces, parts


@pytest.mark.parametrize(("name", "text", "pieces"), CASES)
def test_without_parallel_calls_the_answer_ends_with_the_first(
    name: FormatName, text: str, pieces: list[Piece]
) -> None:
    first = pieces[: pieces.index(CallDone()) + 1]
    for parts in splits(text.encode(), num_random=20):
        assert read(format_of(None, name).parser(NAMES, parallel=False), parts) == first, parts


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_is_text(name: FormatName, text: str) -> None:
    for parts in splits(text.encode()):
        assert read(format_of(None, name).parser(NAMES, parallel=True), parts) == [Text(text)]


@pytest.mark.parametrize(("name", "text", "pieces"), CASES)
def test_arguments_are_json(name: FormatName, text: str, pieces: list[Piece]) -> None:
    del name, text
    for piece in pieces:
        if isinstance(piece, Arguments):
            assert isinstance(json.loads(piece.text), dict)


def test_a_cut_call_keeps_what_it_has_and_is_not_done() -> None:
    parser = format_of(None, "hermes").parser(NAMES, parallel=True)
    pieces = read(parser, [HERMES[:60].encode()])
    assert [type(piece) for piece in pieces] == [CallStarted, Arguments]


def test_text_is_released_as_soon_as_it_cannot_be_a_call() -> None:
    parser = format_of(None, "hermes").parser(NAMES, parallel=True)
    assert parser.feed("<tool_call>{") == []
    assert parser.feed('"name": "weathers') == [Text('<tool_call>{"name": "weathers')]
    assert format_of(None, "llama").parser(NAMES, parallel=True).feed("Hi") == [Text("Hi")]


def test_arguments_stream_as_they_are_written() -> None:
    parser = format_of(None, "hermes").parser(NAMES, parallel=True)
    parser.feed('<tool_call>{"name": "weather", "arguments": {"a"')
    assert parser.feed(": 1") == [Arguments(": 1")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "generic"),
        ("{{ messages }}", "generic"),
        ("within <tool_call></tool_call> XML tags", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' ~ name ~ '[ARGS]' }}", "mistral-args"),
        ("<|python_tag|>", "llama"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_format_comes_from_the_template(template: str | None, name: FormatName) -> None:
    assert format_of(template).name == name
    assert format_of(template, "llama").name == "llama"

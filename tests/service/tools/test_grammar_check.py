"""Hostile schemas and expressions: each is refused with a place, or compiles, in bounded time.

The kinds of vllm-project/vllm#17313, #17248, #19270 and text-generation-inference#2280.
"""

import json
from typing import Any

import anyio
import pytest

from service.errors import ApiError
from service.tools.grammar_check import GrammarChecker


def refusal(grammars: list[Any], schemas: list[tuple[str, Any]]) -> ApiError | None:
    """The error of a grammar, None for a good one."""

    async def check() -> ApiError | None:
        try:
            await GrammarChecker().check(json.dumps({"grammars": grammars}), schemas, "field")
        except ApiError as error:
            return error
        return None

    return anyio.run(check)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objekt"}, "field"),
        (
            {"properties": {"a": {"items": {"anyOf": [{"type": "string"}, {"type": "strin"}]}}}},
            "field.properties.a.items.anyOf[1]",
        ),
        ({"properties": {"a": {"pattern": "(", "type": "string"}}}, "field.properties.a"),
        ({"properties": {"a": {"$ref": "https://example.com/s"}}}, "field.properties.a"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "field.properties.a"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "field"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "field.$defs.a"),
        (False, "field"),
    ],
)
def test_a_bad_schema_is_refused_at_its_place(schema: Any, place: str) -> None:
    error = refusal([{"json_schema": schema}], [("field", schema)])
    assert error is not None
    assert (error.status, error.param) == (400, place)


@pytest.mark.parametrize(
    "lark",
    [
        "start: /(/",
        "start: /a(?=b)/",
        "start: nowhere",
        'start: a0\na3000: "x"\n' + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(3000)),
        f'start: {"(" * 20000}"a"{")" * 20000}',
    ],
)
def test_a_hostile_grammar_is_refused(lark: str) -> None:
    error = refusal([{"lark_grammar": lark}], [])
    assert error is not None
    assert (error.status, error.param) == (400, "field")


@pytest.mark.parametrize(
    "grammar",
    [
        {"json_schema": {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}},
        {"lark_grammar": "start: /(a?){5000}a{5000}/"},
    ],
)
def test_what_would_exceed_a_limit_on_its_way_is_refused_before(grammar: Any) -> None:
    error = refusal([grammar], [])
    assert error is not None
    assert (error.status, error.param) == (400, "field")


def test_a_verdict_is_remembered() -> None:
    async def twice() -> None:
        checker = GrammarChecker()
        for _ in range(2):
            with pytest.raises(ApiError, match=r"Invalid 'field\.items'"):
                bad = {"items": {"type": "x"}}
                await checker.check(
                    json.dumps({"grammars": [{"json_schema": bad}]}), [("field", bad)], "f"
                )

    anyio.run(twice)

"""The keywords of JSON Schema that a grammar holds an answer to, and those that are refused.

Each has a schema, values that match it and values that do not; README.md of `service/tools` shows
the same keywords as a table.
"""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Keyword:
    """A use of one keyword."""

    name: str
    schema: Any
    good: tuple[Any, ...]
    bad: tuple[Any, ...]


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", **fields}


def _array(**fields: Any) -> dict[str, Any]:
    return {"type": "array", **fields}


def _text(**fields: Any) -> dict[str, Any]:
    return {"type": "string", **fields}


_NUMBER: Final = {"type": "number"}
_INTEGER: Final = {"type": "integer"}
_A: Final = {"a": _INTEGER}
_TREE: Final = _object(
    properties={"v": _INTEGER, "next": {"$ref": "#/$defs/tree"}},
    required=["v"],
    additionalProperties=False,
)
_FORMATS: Final[dict[str, tuple[str, str]]] = {
    "date-time": ("2026-11-30T08:00:00Z", "2026-11-30 08:00"),
    "date": ("2024-02-29", "2024-13-01"),
    "time": ("08:00:00Z", "8 o'clock"),
    "duration": ("P3DT4H", "3 days"),
    "email": ("ada@example.com", "ada"),
    "hostname": ("www.example.com", "-x-"),
    "ipv4": ("127.0.0.1", "127.0.0.256"),
    "ipv6": ("2001:db8::1", "2001:zz"),
    "uuid": ("f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "f81d4fae"),
    "uri": ("https://example.com/a?b=c", "no uri"),
}

SUPPORTED: Final = (
    Keyword("type", _text(), ("", "a", 'ü"\\'), (1, None, [])),
    Keyword("type", {"type": ["integer", "null"]}, (-3, None), (1.5, "x")),
    Keyword("type", _NUMBER, (0, -1.5, 2e10), ("1", True)),
    Keyword("type", {"type": "boolean"}, (True, False), (0, "true")),
    Keyword("type", _object(), ({}, {"x": [1]}), ([], "x")),
    Keyword("enum", {"enum": ["red", 2, None]}, ("red", 2, None), ("blue", 3)),
    Keyword("const", {"const": {"a": [1, "x"]}}, ({"a": [1, "x"]},), ({"a": [1]}, 1)),
    Keyword("properties", _object(properties=_A), ({}, {"a": 1}), ({"a": "x"},)),
    Keyword(
        "required",
        _object(properties={**_A, "b": _NUMBER}, required=["b"]),
        ({"b": 1}, {"a": 1, "b": 2}),
        ({}, {"a": 1}),
    ),
    Keyword(
        "additionalProperties",
        _object(properties=_A, additionalProperties=False),
        ({}, {"a": 1}),
        ({"b": 1},),
    ),
    Keyword(
        "additionalProperties",
        _object(additionalProperties={"type": "boolean"}),
        ({}, {"x": True}),
        ({"x": 1},),
    ),
    Keyword(
        "patternProperties",
        _object(patternProperties={"^n[0-9]$": _INTEGER}, additionalProperties=False),
        ({}, {"n1": 1}),
        ({"n1": "x"}, {"m": 1}),
    ),
    Keyword(
        "minProperties",
        _object(additionalProperties=_INTEGER, minProperties=2),
        ({"a": 1, "b": 2},),
        ({}, {"a": 1}),
    ),
    Keyword(
        "maxProperties",
        _object(additionalProperties=_INTEGER, maxProperties=1),
        ({}, {"a": 1}),
        ({"a": 1, "b": 2},),
    ),
    Keyword("items", _array(items=_INTEGER), ([], [1, 2]), (["x"], [1, "x"])),
    Keyword(
        "prefixItems",
        _array(prefixItems=[_INTEGER, _text()], items=False, minItems=2),
        ([1, "x"],),
        (["x", 1], [1, "x", 2]),
    ),
    Keyword("minItems", _array(items=_INTEGER, minItems=2), ([1, 2], [1, 2, 3]), ([], [1])),
    Keyword("maxItems", _array(items=_INTEGER, maxItems=1), ([], [1]), ([1, 2],)),
    Keyword("maxItems", _array(maxItems=0), ([],), ([1],)),
    Keyword("minimum", {**_INTEGER, "minimum": -5}, (-5, 0, 10**6), (-6,)),
    Keyword("maximum", {**_NUMBER, "maximum": 2.5}, (2.5, -1, 0), (2.6, 3)),
    Keyword("exclusiveMinimum", {**_INTEGER, "exclusiveMinimum": 3}, (4, 100), (3, 0)),
    Keyword("exclusiveMaximum", {**_INTEGER, "exclusiveMaximum": 3}, (2, -9), (3, 4)),
    Keyword("multipleOf", {**_INTEGER, "multipleOf": 5}, (0, 5, 25), (3, 12)),
    Keyword("minLength", _text(minLength=2), ("ab", "äöü"), ("", "ä")),
    Keyword("maxLength", _text(maxLength=3), ("", "日本語"), ("abcd",)),
    Keyword("pattern", _text(pattern="^[A-Z]{2}-[0-9]+$"), ("AB-1",), ("ab-1", "AB-")),
    *(
        Keyword(f"format: {name}", _text(format=name), (good,), (bad, ""))
        for name, (good, bad) in _FORMATS.items()
    ),
    Keyword("anyOf", {"anyOf": [_INTEGER, _text(maxLength=1)]}, (1, "x"), ("xy", None)),
    Keyword("oneOf", {"oneOf": [_INTEGER, _text()]}, (1, "x"), (1.5, None)),
    Keyword(
        "allOf",
        {"allOf": [_object(properties=_A, required=["a"]), _object(required=["b"])]},
        ({"a": 1, "b": 2},),
        ({"a": 1}, {"b": 1}),
    ),
    Keyword(
        "$ref", {"$ref": "#/$defs/n", "$defs": {"n": {**_INTEGER, "minimum": 0}}}, (0, 7), (-1, "x")
    ),
    Keyword(
        "$defs",
        {"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}},
        ({"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}),
        ({}, {"v": 1, "next": {}}),
    ),
    Keyword(
        "definitions",
        {**_array(items={"$ref": "#/definitions/n"}), "definitions": {"n": _INTEGER}},
        ([], [1]),
        (["x"],),
    ),
)

REFUSED: Final[dict[str, Any]] = {
    "not": {"not": _text()},
    "if": {"if": _text(), "then": {"minLength": 2}},
    "contains": _array(contains=_INTEGER),
    "uniqueItems": _array(uniqueItems=True),
    "propertyNames": _object(propertyNames={"pattern": "^a"}),
    "dependentRequired": _object(dependentRequired={"a": ["b"]}),
    "dependentSchemas": _object(dependentSchemas={"a": {"required": ["b"]}}),
    "unevaluatedProperties": _object(unevaluatedProperties=False),
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf": {"oneOf": [_text(), _text(maxLength=2)]},
    "$ref": {"$ref": "https://example.com/schema.json"},
    "format": _text(format="no-such-format"),
}
"""A use of each keyword that would mean something else if it were ignored."""

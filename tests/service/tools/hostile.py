"""Families of schemas that try to hurt who compiles them; each makes one from a random source."""

import random
from collections.abc import Callable
from typing import Any, Final, TypeAlias

Family: TypeAlias = Callable[[random.Random], Any]

_WEIRD: Final = ("", "\u0000", "\u2028", "é" * 50, "😀" * 20, "\\", '"', "a" * 5000)
_WRONG: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    -1,
    1.5,
    "x",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    2**63,
    -(2**70),
    1e308,
)
_KEYS: Final = (
    "type", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "multipleOf", "enum", "const", "anyOf", "oneOf", "allOf", "$ref",
    "$defs", "minProperties", "maxProperties",
)  # fmt: skip


def deep(rng: random.Random) -> Any:
    """Nested once per level, up to what the edge lets through and beyond."""
    schema: Any = {"type": "integer"}
    for _ in range(rng.randint(10, 60)):
        schema = rng.choice(
            (
                {"type": "object", "properties": {"a": schema}, "required": ["a"]},
                {"type": "array", "items": schema},
                {"anyOf": [schema, {"type": "null"}]},
                {"allOf": [{"title": "x"}, schema]},
            )
        )
    return schema


def huge_enum(rng: random.Random) -> Any:
    count = rng.choice((1000, 10_000, 50_000))
    return {"enum": [f"{rng.getrandbits(64):x}" * rng.randint(1, 3) for _ in range(count)]}


def bounds(rng: random.Random) -> Any:
    """Counts and lengths that are huge, negative, crossed or no whole numbers."""
    values = (-1, 0, 1.5, 10**5, 10**9, 2**31, 2**63, 2**64, 10**40, 1e300, -(10**9))
    kind, low, high = rng.choice(
        (
            ("string", "minLength", "maxLength"),
            ("array", "minItems", "maxItems"),
            ("object", "minProperties", "maxProperties"),
            ("integer", "minimum", "maximum"),
            ("number", "exclusiveMinimum", "exclusiveMaximum"),
        )
    )
    schema = {"type": kind, low: rng.choice(values), high: rng.choice(values)}
    if kind in ("integer", "number"):
        schema["multipleOf"] = rng.choice((0, -3, 1e-300, 10**30, 0.1, 7, 999_999_937))
    return schema


def references(rng: random.Random) -> Any:
    """Definitions that refer to one another, in circles and in doubling trees, and elsewhere."""
    count = rng.randint(1, 40)
    names = [f"d{i}" for i in range(count)]

    def ref() -> dict[str, str]:
        outside = ("https://example.com/x", "file:///etc/passwd", "#/nowhere", "#/$defs/d0/a", "")
        name = rng.choice(outside) if rng.random() < 0.03 else f"#/$defs/{rng.choice(names)}"
        return {"$ref": name}

    def one() -> Any:
        return rng.choice(
            (
                ref(),
                {"allOf": [ref(), ref()]},
                {"anyOf": [ref(), ref(), {"type": "integer"}]},
                {"type": "array", "items": ref()},
                {"type": "object", "properties": {"a": ref(), "b": ref()}, "required": ["a"]},
            )
        )

    return {"$ref": "#/$defs/d0", "$defs": {name: one() for name in names}}


def doubling(rng: random.Random) -> Any:
    """Each definition is twice the next: small to write, exponential when it is spelt out."""
    depth = rng.randint(10, 60)
    combine = rng.choice(("allOf", "anyOf", "oneOf", "prefixItems"))
    defs: dict[str, Any] = {f"d{depth}": {"type": "object", "properties": {"a": {}}}}
    for level in range(depth):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        defs[f"d{level}"] = {combine: [below, below]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def patterns(rng: random.Random) -> Any:
    """Expressions that explode when they are compiled, or are none."""
    n = rng.choice((5, 50, 500, 5000))
    pattern = rng.choice(
        (
            f"^(a+)+{{{n}}}$",
            f"^(([a-z]{{1,{n}}})*){{1,{n}}}$",
            f"^(.*a){{{n}}}$",
            f"^(a|aa|a*b){{{n}}}$",
            f"^[\\p{{L}}]{{{n}}}.*[\\p{{N}}]{{{n}}}$",
            "foo**",
            "(" * n,
            "(?=a)b",
            "(a)\\1",
            "[z-a]",
            "\\",
            f".*(.{{{n}}}x|y).*",
            "(?i)" + "ß" * n,
        )
    )
    if rng.random() < 0.3:
        return {
            "type": "object",
            "patternProperties": {pattern: {}, pattern + "b": {"type": "null"}},
        }
    return {"type": "string", "pattern": pattern, "minLength": rng.choice((0, 3, n))}


def unions(rng: random.Random) -> Any:
    """Many alternatives of many alternatives, that overlap or not."""

    def level(depth: int) -> Any:
        if not depth:
            name = f"p{rng.randint(0, 20)}"
            field = {"type": rng.choice(("string", "integer", "boolean"))}
            return {"type": "object", "properties": {name: field}, "required": [name]}
        kind = rng.choice(("anyOf", "oneOf", "allOf"))
        return {kind: [level(depth - 1) for _ in range(rng.randint(2, 12))]}

    return level(rng.randint(1, 3))


def wide(rng: random.Random) -> Any:
    """Thousands of properties, all optional or all required."""
    names = [f"{rng.choice(_WEIRD)}{i}" for i in range(rng.choice((200, 2000, 8000)))]
    schema: dict[str, Any] = {"type": "object", "properties": {n[-40:]: {} for n in names}}
    if rng.random() < 0.5:
        schema["required"] = [name[-40:] for name in names]
    return schema


def odd_text(rng: random.Random) -> Any:
    """Names and values of odd characters, in every place that takes text."""
    texts = [rng.choice(_WEIRD) + chr(rng.randrange(0x20, 0xD7FF)) for _ in range(5)]
    return {
        "type": "object",
        "title": texts[0],
        "properties": {texts[1]: {"const": texts[2]}, texts[3]: {"enum": texts}},
        "required": [texts[1], texts[4]],
        "additionalProperties": {"type": "string", "pattern": texts[4]},
    }


def wrong_types(rng: random.Random) -> Any:
    """Every keyword may hold anything."""

    def one(depth: int) -> Any:
        fields: dict[str, Any] = {}
        for key in rng.sample(_KEYS, rng.randint(1, 5)):
            fields[key] = one(depth - 1) if depth and rng.random() < 0.3 else rng.choice(_WRONG)
        return fields

    return one(3)


FAMILIES: Final[tuple[Family, ...]] = (
    deep,
    huge_enum,
    bounds,
    references,
    doubling,
    patterns,
    unions,
    wide,
    odd_text,
    wrong_types,
)

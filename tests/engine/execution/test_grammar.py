"""Token masks of the default model: what matches, what ends, and whose fault a fault is."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.execution.grammar import GrammarCompiler, TokenMatcher
from engine.text import TextAssets, load_text
from engine.text.default_model import find_default_model


@pytest.fixture(scope="module")
def text() -> TextAssets:
    model = find_default_model()
    assert model is not None
    return load_text(model)


@pytest.fixture(scope="module")
def compiler(text: TextAssets) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(text.vocabulary, text.encoder, text.eos_token_ids)
    yield compiler
    compiler.close()


def schema_grammar(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def allowed(matcher: TokenMatcher, num_ids: int) -> set[int]:
    row = np.zeros(num_ids, dtype=np.float32)
    matcher.mask(row)
    return set(np.flatnonzero(np.isfinite(row)).tolist())


KEYWORDS: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a":1}'),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, "{}"),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, '{"x":true}'),
    ({"type": "object", "properties": {}, "additionalProperties": False}, "{}"),
    ({"type": "array", "items": {"type": "string"}, "maxItems": 0}, "[]"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, "[1,2]"),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[7]"),
    ({"type": "string", "pattern": "^[a-c]{2}$"}, '"ab"'),
    ({"type": "string", "minLength": 1, "maxLength": 3}, '"abc"'),
    ({"type": "string", "format": "date"}, '"2025-01-31"'),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 5}, "4"),
    ({"type": "number", "multipleOf": 0.5}, "1.5"),
    ({"type": ["string", "null"]}, "null"),
    ({"enum": ["a", 1, None]}, '"a"'),
    ({"const": {"a": [1]}}, '{"a":[1]}'),
    ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "12"),
    ({"allOf": [{"type": "integer"}, {"minimum": 10}]}, "12"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, "5"),
    (True, '{"a":[1,"x"]}'),
]


@pytest.mark.parametrize(("schema", "valid"), KEYWORDS)
def test_a_keyword_lets_valid_output_through_to_its_end(
    text: TextAssets, compiler: GrammarCompiler, schema: Any, valid: str
) -> None:
    matcher = compiler.start(schema_grammar(schema))
    size = text.vocabulary.size
    for token_id in text.encoder.encode(valid).tolist():
        assert token_id in allowed(matcher, size)
        matcher.accept(token_id)
    assert not matcher.fault
    assert matcher.complete or text.eos_token_ids <= allowed(matcher, size)


def test_the_end_is_not_allowed_before_the_output_matches(
    text: TextAssets, compiler: GrammarCompiler
) -> None:
    matcher = compiler.start(schema_grammar({"type": "object"}))
    for token_id in text.encoder.encode('{"a": "b').tolist():
        assert not text.eos_token_ids & allowed(matcher, text.vocabulary.size)
        matcher.accept(token_id)
    assert not matcher.complete


def test_a_padded_head_is_ruled_out(text: TextAssets, compiler: GrammarCompiler) -> None:
    matcher = compiler.start('{"grammars": [{"lark_grammar": "start: /[a-z]+/"}]}')
    ids = allowed(matcher, text.vocabulary.size + 100)
    assert ids
    assert max(ids) < text.vocabulary.size


@pytest.mark.parametrize("grammar", ["start: /(/", "{", schema_grammar({"type": "x"}), "start: x"])
def test_a_bad_grammar_is_a_fault_and_rules_everything_out(
    text: TextAssets, compiler: GrammarCompiler, grammar: str
) -> None:
    matcher = compiler.start(grammar)
    assert allowed(matcher, text.vocabulary.size) == set()
    assert matcher.fault
    assert not matcher.complete
    matcher.accept(5)


def test_a_token_that_does_not_match_is_a_fault(
    text: TextAssets, compiler: GrammarCompiler
) -> None:
    matcher = compiler.start(schema_grammar({"type": "object"}))
    matcher.accept(text.encoder.encode("no").tolist()[0])
    assert matcher.fault

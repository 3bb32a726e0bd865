"""JSON Schema's keywords one by one: what a grammar lets a model write, the schema allows."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker  # type: ignore[import-untyped]
from llguidance import LLMatcher

import service.tools
from service.conversation import Conversation, GenerationOptions, GenerationRequest, OutputFormat
from service.tools.formats import AnswerFormat
from service.tools.grammar import grammar_for
from tests.service.tools.byte_tokens import EOS, TOKENIZER
from tests.service.tools.keywords import REFUSED, SUPPORTED, Keyword
from tests.service.tools.test_grammar_check import refusal

NUM_WALKS = 20
MAX_BYTES = 400
ENDERS = frozenset(b'"}]@')
JUDGED = FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))


def matcher_of(schema: Any) -> LLMatcher:
    """A matcher of the grammar that an answer of this schema is generated with."""
    format = OutputFormat("json_schema", json.dumps(schema), "format")
    request = GenerationRequest("r", "m", Conversation(()), GenerationOptions(output_format=format))
    grammar = grammar_for(request, AnswerFormat("generic", thinks=False), {}, False)
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def accepts(schema: Any, value: Any) -> bool:
    matcher = matcher_of(schema)
    data = list(json.dumps(value, ensure_ascii=False).encode())
    return (
        matcher.validate_tokens(data) == len(data)
        and matcher.consume_tokens(data)
        and matcher.is_accepting()
    )


def walk(schema: Any, rng: random.Random) -> str:
    """A text that a model without a will of its own writes under the schema's grammar."""
    matcher = matcher_of(schema)
    written = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(EOS + 1) if mask[token // 8] >> (token % 8) & 1]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            break
        enders = [token for token in allowed if token in ENDERS]
        token = rng.choice(enders if enders and rng.random() < 0.4 else allowed)
        if token == EOS:
            break
        written.append(token)
        assert matcher.consume_token(token)
        assert len(written) < MAX_BYTES, written
    return written.decode()


@pytest.mark.parametrize("keyword", SUPPORTED, ids=lambda each: each.name)
def test_a_keyword_is_held(keyword: Keyword) -> None:
    for value in keyword.good:
        assert accepts(keyword.schema, value), value
    for value in keyword.bad:
        assert not accepts(keyword.schema, value), value


@pytest.mark.parametrize("keyword", SUPPORTED, ids=lambda each: each.name)
def test_what_is_written_is_valid(keyword: Keyword) -> None:
    validator = Draft202012Validator(keyword.schema, format_checker=JUDGED)
    rng = random.Random(keyword.name)
    for _ in range(NUM_WALKS):
        validator.validate(json.loads(walk(keyword.schema, rng)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_keyword_that_cannot_be_held_is_refused(name: str) -> None:
    schema = {"properties": {"a": REFUSED[name]}}
    error = refusal([{"json_schema": schema}], [("field", schema)])
    assert error is not None
    assert (error.status, error.param) == (400, "field.properties.a")


def test_the_table_says_what_is_tested() -> None:
    readme = (Path(service.tools.__file__).parent / "README.md").read_text()
    rows = dict(re.findall(r"^\| (held|refused) \| (.+) \|$", readme, re.MULTILINE))
    held = {each.name.removeprefix("format: ") for each in SUPPORTED}
    assert set(re.findall(r"`(.+?)`", rows["held"])) - {"format"} == held
    assert set(re.findall(r"`(.+?)`", rows["refused"])) == REFUSED.keys()

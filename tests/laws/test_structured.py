"""Law: with a grammar every answer that ends by itself matches it, whatever the model likes.

The kinds of vllm-project/vllm#38696, #13260 and mlc-ai/xgrammar#412; the default model at a
temperature at which, left alone, it writes anything.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.core import Core
from engine.execution.grammar import GrammarCompiler
from engine.runtime import build_core
from engine.text import TextAssets, load_text
from engine.types import (
    EngineConfig,
    EngineRequest,
    Finished,
    FinishReason,
    SamplingParams,
    TokenDelta,
    pack_tokens,
)
from service.conversation import (
    Conversation,
    GenerationOptions,
    GenerationRequest,
    Message,
    OutputFormat,
    Tool,
    ToolChoice,
)
from service.tools.formats import AnswerFormat, format_of
from service.tools.grammar import grammar_for
from service.tools.pieces import Arguments, CallDone, CallStarted, Text
from tests.engine.test_runtime import model_path

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = Tool(
    "set_age",
    {"type": "function", "function": {"name": "set_age", "parameters": PARAMETERS}},
)
GENERIC = format_of(None)


@pytest.fixture(scope="module")
def text() -> TextAssets:
    return load_text(model_path())


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    built = build_core(EngineConfig(model=str(model_path()), max_context=512))
    yield built
    built.close()


def grammar(
    options: GenerationOptions, tools: tuple[Tool, ...] = (), format: AnswerFormat = GENERIC
) -> str:
    conversation = Conversation((Message("user", "hi"),), tools=tools)
    return grammar_for(GenerationRequest("r", "m", conversation, options), format, {}, False)


def run(
    core: Core, text: TextAssets, grammars: list[str], max_tokens: int = 60, **sampling: Any
) -> list[tuple[str, Finished]]:
    """One answer for each grammar, all in one batch, each with a seed of its own."""
    prompt = pack_tokens(
        text.encoder.encode(
            "<|im_start|>user\nDescribe a person.<|im_end|>\n<|im_start|>assistant\n"
        )
    )
    said = {f"r{index}": b"" for index in range(len(grammars))}
    ends: dict[str, Finished] = {}
    for index, each in enumerate(grammars):
        params = SamplingParams(max_tokens, temperature=1.0, seed=index, **sampling)
        core.add(EngineRequest(f"r{index}", prompt, params, grammar=each))
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokenDelta):
                said[event.request_id] += event.text
            elif isinstance(event, Finished):
                ends[event.request_id] = event
    return [(said[name].decode(), ends[name]) for name in said]


def schema_options(schema: Any, **fields: Any) -> GenerationOptions:
    return GenerationOptions(
        output_format=OutputFormat("json_schema", json.dumps(schema), "f"), **fields
    )


def test_every_answer_is_valid_json_of_the_schema(core: Core, text: TextAssets) -> None:
    answers = run(core, text, [grammar(schema_options(SCHEMA))] * 20)
    ended = [answer for answer, end in answers if end.reason is FinishReason.STOP]
    assert len(ended) >= 10
    for answer in ended:
        value = json.loads(answer)
        assert value.keys() <= {"name", "age"}
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 12
        assert isinstance(value.get("age", 0), int)
    for answer, end in answers:
        assert end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        outside = re.sub(r'"(\\.|[^"\\])*"?', "s", answer)
        assert not re.search(r"\s{9}", outside)


def test_a_model_that_loves_white_space_ends_all_the_same(core: Core, text: TextAssets) -> None:
    """The bias is as strong as may be: without a bound it would write nothing else."""
    vocabulary = text.vocabulary
    white = [i for i in range(vocabulary.size) if vocabulary.token_bytes(i).isspace()]
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    biases = tuple((token_id, 100.0) for token_id in white[:1000])
    grammars = [grammar(schema_options(schema))] * 4
    for answer, end in run(core, text, grammars, max_tokens=120, logit_bias=biases):
        assert end.reason is FinishReason.STOP
        assert len(json.loads(answer)) == 3
        assert re.search(r"\s{4}", answer), "it did what it could"
        assert not re.search(r"\s{9}", answer)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {}, "additionalProperties": False}, {}),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "additionalProperties": False,
            },
            None,
        ),
        ({"type": "array", "maxItems": 0}, []),
        ({"const": "only"}, "only"),
        ({"anyOf": [{"const": "ab"}, {"const": "abc"}], "type": "string"}, None),
    ],
)
def test_what_is_complete_ends(core: Core, text: TextAssets, schema: Any, value: Any) -> None:
    [(answer, end)] = run(core, text, [grammar(schema_options(schema))], max_tokens=40)
    assert end.reason is FinishReason.STOP
    assert json.loads(answer) == (value if value is not None else json.loads(answer))


def test_an_answer_that_is_cut_says_length(core: Core, text: TextAssets) -> None:
    [(answer, end)] = run(core, text, [grammar(schema_options(SCHEMA))], max_tokens=4)
    assert end.reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match=r"delimiter|Unterminated|Expecting"):
        json.loads(answer)


@pytest.mark.parametrize(
    "name", ["hermes", "llama", "pythonic", "mistral", "mistral-args", "generic"]
)
def test_a_required_call_is_made_and_read_back(core: Core, text: TextAssets, name: Any) -> None:
    format = format_of(None, name)
    options = GenerationOptions(tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    for answer, end in run(core, text, [grammar(options, (TOOL,), format)] * 3):
        assert end.reason is FinishReason.STOP
        parser = format.parser(("set_age",), parallel=False, by_grammar=True)
        started, arguments, done = [*parser.feed(answer), *parser.finish()]
        assert (started, done) == (CallStarted("set_age"), CallDone())
        assert isinstance(arguments, Arguments)
        assert 0 <= json.loads(arguments.text)["age"] <= 150


def test_thoughts_are_free_and_the_grammar_begins_after_them(text: TextAssets) -> None:
    thinking = AnswerFormat("hermes", thinks=True)
    wanted = grammar(schema_options({"const": "x"}), format=thinking)
    thought = '<think>hm {"a" </think>\n\n"x"'
    assert _accepts(text, wanted, thought) == len(text.encoder.encode(thought))
    assert _accepts(text, wanted, '"x"') == len(text.encoder.encode('"x"'))
    assert _accepts(text, wanted, "plain") == 0


def _accepts(text: TextAssets, wanted: str, output: str) -> int:
    """How many tokens of an output match a grammar."""
    compiler = GrammarCompiler(text.vocabulary, text.encoder, text.eos_token_ids)
    matcher = compiler.start(wanted)
    count = 0
    for token_id in text.encoder.encode(output).tolist():
        matcher.accept(token_id)
        count += not matcher.fault
    compiler.close()
    return count


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[0-9]{2}/[a-c]", r"[0-9]{2}/[a-c]"),
        ("choice", '["yes, \\"sir\\"", "nö"]', r'yes, "sir"|nö'),
        ("lark", 'start: "a" b\nb: /[xy]{2}/', r"a[xy]{2}"),
    ],
)
def test_other_grammars_match(
    core: Core, text: TextAssets, kind: Any, source: str, pattern: str
) -> None:
    options = GenerationOptions(output_format=OutputFormat(kind, source, "f"))
    for answer, end in run(core, text, [grammar(options)] * 3):
        assert end.reason is FinishReason.STOP
        assert re.fullmatch(pattern, answer)


def test_a_grammar_that_fails_ends_its_own_request_only(core: Core, text: TextAssets) -> None:
    good = grammar(schema_options({"const": 1}))
    bad, fine = run(core, text, ['{"grammars": [{"lark_grammar": "start: /(/"}]}', good])
    assert bad[1].reason is FinishReason.ERROR
    assert "grammar" in bad[1].message
    assert (fine[0], fine[1].reason) == ("1", FinishReason.STOP)
    core.audit()


def test_text_stays_free_without_a_grammar() -> None:
    assert grammar(GenerationOptions(), (TOOL,)) == ""
    assert grammar(GenerationOptions(tool_choice=ToolChoice("required"))) == ""
    parser = GENERIC.parser(("set_age",), parallel=True)
    assert parser.feed("free") == [Text("free")]

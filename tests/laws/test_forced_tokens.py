"""Law: tokens that a grammar forces take no step of their own, and change nothing but the time.

A request that asks for log-probabilities is never spared a step: it is the judge here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from engine.core import Core
from engine.runtime import build_core
from engine.scheduling.request import MAX_FORCED
from engine.text import TextAssets, load_text
from engine.types import (
    EngineConfig,
    EngineRequest,
    Finished,
    FinishReason,
    SamplingParams,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)
from tests.engine.test_runtime import model_path

KEYS = ("temperature_in_degrees_celsius", "probability_of_precipitation", "name_of_the_station")
WEATHER: Any = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "integer", "minimum": -90, "maximum": 60},
        KEYS[1]: {"enum": ["no precipitation", "some precipitation", "much precipitation"]},
        KEYS[2]: {"type": "string", "maxLength": 12},
    },
    "required": list(KEYS),
    "additionalProperties": False,
}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONG = {"const": " ".join(f"word-{i}" for i in range(50))}


@dataclass
class Answer:
    """What one request got, delta by delta."""

    deltas: list[list[int]]
    text: bytes
    end: Finished

    @property
    def tokens(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta]


def grammar(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": COMPACT}}]})


@pytest.fixture(scope="module")
def text() -> TextAssets:
    return load_text(model_path())


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    config = EngineConfig(model=str(model_path()), max_context=1024, speculation=False)
    built = build_core(config)
    yield built
    built.close()


def asked(
    text: TextAssets,
    name: str,
    schema: Any,
    sampling: SamplingParams,
    tail: str = "",
    **fields: Any,
) -> EngineRequest:
    said = f"<|im_start|>user\nThe weather of {name}?{tail}<|im_end|>\n<|im_start|>assistant\n"
    prompt = pack_tokens(text.encoder.encode(said))
    return EngineRequest(name, prompt, sampling, grammar=grammar(schema), **fields)


def run(core: Core, *requests: EngineRequest) -> dict[str, Answer]:
    """All in one batch; their credits come back at once."""
    deltas: dict[str, list[list[int]]] = {request.id: [] for request in requests}
    texts = dict.fromkeys(deltas, b"")
    ends: dict[str, Finished] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokenDelta):
                ids: list[int] = unpack_tokens(event.token_ids).tolist()
                deltas[event.request_id].append(ids)
                texts[event.request_id] += event.text
                core.grant(event.request_id, len(ids))
            elif isinstance(event, Finished):
                ends[event.request_id] = event
    assert core.audit().referenced == 0
    return {name: Answer(deltas[name], texts[name], ends[name]) for name in deltas}


def stepwise(request: EngineRequest) -> EngineRequest:
    """The same request with a step for every token."""
    sampling = msgspec.structs.replace(request.sampling, logprobs=0)
    return msgspec.structs.replace(request, sampling=sampling)


def assert_same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert one.text == other.text
    assert one.end.num_output_tokens == other.end.num_output_tokens == len(one.tokens)
    assert (one.end.reason, one.end.stop, one.end.stop_token_id) == (
        other.end.reason,
        other.end.stop,
        other.end.stop_token_id,
    )


def both(core: Core, request: EngineRequest) -> Answer:
    """The answer, once it is the same as that of a step for every token."""
    (one,) = run(core, request).values()
    (other,) = run(core, stepwise(request)).values()
    assert all(len(delta) == 1 for delta in other.deltas)
    assert_same(one, other)
    return one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_long_keys_take_fewer_steps_than_tokens(
    core: Core, text: TextAssets, temperature: float
) -> None:
    sampling = SamplingParams(120, temperature=temperature, seed=3)
    before = core.stats()
    (answer,) = run(core, asked(text, "Oslo", WEATHER, sampling)).values()
    after = core.stats()
    assert answer.end.reason is FinishReason.STOP
    assert set(json.loads(answer.text)) == set(KEYS)
    num_tokens = after.num_output_tokens - before.num_output_tokens
    num_forced = after.num_forced_tokens - before.num_forced_tokens
    assert num_tokens == len(answer.tokens) == answer.end.num_output_tokens
    assert num_forced == num_tokens - len(answer.deltas)
    assert after.num_steps - before.num_steps < num_tokens * 0.6
    assert_same(both(core, asked(text, "Oslo", WEATHER, sampling)), answer)


RULES = (
    SamplingParams(120, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(120, stop=(b"of_precip",)),
    SamplingParams(120, stop=(b"of_precip",), include_stop=True),
    SamplingParams(120, stop=(b"of_precip",), min_tokens=30),
    SamplingParams(120, min_tokens=100),
    SamplingParams(120, ignore_eos=True),
    SamplingParams(120, logit_bias=((79, -100.0),)),
)


@pytest.mark.parametrize("sampling", RULES)
def test_what_a_request_rules_holds_token_by_token(
    core: Core, text: TextAssets, sampling: SamplingParams
) -> None:
    answer = both(core, asked(text, "Lima", WEATHER, sampling))
    stopped = bool(sampling.stop) and not sampling.min_tokens
    assert answer.end.stop == (b"of_precip" if stopped else b"")
    assert any(len(delta) > 1 for delta in answer.deltas)


def test_a_stop_token_among_the_forced_ends_it(core: Core, text: TextAssets) -> None:
    (whole,) = run(core, asked(text, "Rome", WEATHER, SamplingParams(120))).values()
    forced = next(delta for delta in whole.deltas if len(delta) > 3)
    sampling = SamplingParams(120, stop_token_ids=(forced[2],))
    answer = both(core, asked(text, "Rome", WEATHER, sampling))
    assert answer.tokens[-1] == answer.end.stop_token_id == forced[2]


def test_every_length_cuts_where_it_should(core: Core, text: TextAssets) -> None:
    whole = both(core, asked(text, "Bern", WEATHER, SamplingParams(120)))
    requests = [
        asked(text, "Bern", WEATHER, SamplingParams(length))
        for length in range(1, len(whole.tokens))
    ]
    requests = [msgspec.structs.replace(r, id=f"r{i}") for i, r in enumerate(requests, 1)]
    for length, answer in enumerate(run(core, *requests).values(), 1):
        assert answer.tokens == whole.tokens[:length]
        assert answer.end.reason is FinishReason.LENGTH


def test_allowed_tokens_are_asked_of_every_token(core: Core, text: TextAssets) -> None:
    """A forced token that they rule out is the request's fault, as ever."""
    sampling = SamplingParams(120, allowed_token_ids=tuple(text.encoder.encode('{"temper')))
    answers = [
        run(core, request).popitem()[1]
        for request in (
            asked(text, "Kyiv", WEATHER, sampling),
            stepwise(asked(text, "Kyiv", WEATHER, sampling)),
        )
    ]
    assert_same(*answers)
    assert answers[0].end.reason is FinishReason.ERROR


def test_a_long_stretch_comes_in_bounded_pieces_and_costs_its_credits(
    core: Core, text: TextAssets
) -> None:
    answer = both(core, asked(text, "Cork", LONG, SamplingParams(900)))
    assert json.loads(answer.text) == LONG["const"]
    assert max(len(delta) for delta in answer.deltas) == MAX_FORCED + 1
    few = asked(text, "Cork", LONG, SamplingParams(900), credits=5)
    (poor,) = run(core, few).values()
    assert_same(poor, answer)
    assert max(len(delta) for delta in poor.deltas) == 5
    core.add(few)
    seen = 0
    while core.has_work:
        seen += sum(len(e.token_ids) // 4 for e in core.step() if isinstance(e, TokenDelta))
    assert seen == 5, "without credit nothing goes on"
    core.abort("Cork")
    (end,) = core.step()
    assert isinstance(end, Finished)
    assert end.num_output_tokens == 5


def test_an_abort_among_uncomputed_tokens_leaves_nothing(core: Core, text: TextAssets) -> None:
    core.add(asked(text, "Nice", LONG, SamplingParams(900)))
    forced: list[int] = []
    while len(forced) < 2:
        deltas = [event for event in core.step() if isinstance(event, TokenDelta)]
        forced = unpack_tokens(deltas[0].token_ids).tolist() if deltas else []
    core.abort("Nice")
    (end,) = core.step()
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.ABORT
    assert core.audit().referenced == 0


def test_a_full_batch_and_a_full_pool_change_nothing(core: Core, text: TextAssets) -> None:
    """Little room in a step, pages taken away, answers resumed among forced tokens."""
    schemas = {f"city {i}": WEATHER if i % 2 else LONG for i in range(4)}
    requests = [
        asked(text, name, schema, SamplingParams(150, temperature=0.8, seed=5))
        for name, schema in schemas.items()
    ]
    expected = run(core, *map(stepwise, requests))
    config = EngineConfig(
        model=str(model_path()),
        kv_memory_bytes=16 * core.info.page_bytes,
        max_context=256,
        decode_token_budget=16,
    )
    tight = build_core(config)
    try:
        answers = run(tight, *requests)
        assert tight.stats().num_preemptions > 0
        assert tight.stats().num_forced_tokens > 150
    finally:
        tight.close()
    for name, answer in answers.items():
        assert_same(answer, expected[name])

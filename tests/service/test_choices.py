"""Chat with several choices, and every field that reaches the engine."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from engine.scripted import Script, ScriptStep, text_script
from engine.types import EngineRequest, FinishReason, SamplingParams, unpack_tokens
from tests.service.calls import CHAT, ask, body, data_of, stream
from tests.service.conftest import VOCAB, LiveServer, run_server

TEXTS = ["one", "two and more", "drei 😸"]


class Cast:
    """Says `TEXTS` in turn, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.scripts: list[Script] = []
        self._lock = threading.Lock()

    def __call__(self, request: EngineRequest) -> Script:
        with self._lock:
            self.requests.append(request)
            return self.scripts[(len(self.requests) - 1) % len(self.scripts)]

    def play(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.requests.clear()

    @property
    def sampling(self) -> list[SamplingParams]:
        return [request.sampling for request in self.requests]


@pytest.fixture(scope="module")
def cast() -> Cast:
    return Cast()


@pytest.fixture(scope="module")
def server(cast: Cast) -> Iterator[LiveServer]:
    with run_server(script_for=cast) as running:
        yield running


def with_cached(script: Script, num_cached: int) -> Script:
    return Script(script.steps, script.finish, num_cached_tokens=num_cached)


def test_choices_are_in_order_and_usage_counts_the_prompt_once(
    cast: Cast, server: LiveServer
) -> None:
    cast.play(*(with_cached(text_script(text), 2 + i) for i, text in enumerate(TEXTS)))
    answer = ask(server, n=3)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in answer["choices"]] == TEXTS
    one = ask(server)["usage"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == one["prompt_tokens"]
    assert usage["completion_tokens"] == sum(len(text.encode()) for text in TEXTS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("include_usage", [False, True])
def test_streamed_choices_joined_are_the_unstreamed_ones(
    cast: Cast, server: LiveServer, include_usage: bool
) -> None:
    """Fault 32: with `include_usage` exactly one chunk has usage, the last, without choices."""
    cast.play(*(text_script(text, 2) for text in TEXTS))
    whole = ask(server, n=3, return_token_ids=True)
    cast.play(*(text_script(text, 2) for text in TEXTS))
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = stream(server, n=3, return_token_ids=True, **options)
    texts: dict[int, str] = defaultdict(str)
    ids: dict[int, list[int]] = {}
    finishes: list[int] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"] is not None:
                finishes.append(choice["index"])
                ids[choice["index"]] = choice["token_ids"]
    assert [texts[i] for i in range(3)] == TEXTS
    assert sorted(finishes) == [0, 1, 2]
    assert [c["token_ids"] for c in whole["choices"]] == [ids[i] for i in range(3)]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    with_usage = [i for i, chunk in enumerate(chunks) if chunk.get("usage")]
    assert with_usage == [len(chunks) - 1]
    assert chunks[-1]["usage"] == whole["usage"]
    assert bool(chunks[-1]["choices"]) is not include_usage
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_each_choice_has_its_own_seed_and_the_same_prompt(cast: Cast, server: LiveServer) -> None:
    cast.play(text_script("x"))
    ask(server, n=4, seed=7)
    assert [sampling.seed for sampling in cast.sampling] == [7, 8, 9, 10]
    assert len({request.id for request in cast.requests}) == 4
    assert len({request.token_ids for request in cast.requests}) == 1
    ask(server, n=2, seed=2**63 - 1)
    assert [sampling.seed for sampling in cast.sampling[4:]] == [2**63 - 1, 0]


def test_every_choice_is_recorded(cast: Cast, server: LiveServer) -> None:
    cast.play(text_script("x"))
    before = len(server.records)
    ask(server, n=4)
    ended = server.ended(before + 4)[before:]
    assert [record.finish_reason for record in ended] == [FinishReason.STOP] * 4


@pytest.mark.parametrize("streamed", [False, True])
def test_one_choice_that_fails_fails_the_answer_and_ends_the_others(
    cast: Cast, server: LiveServer, streamed: bool
) -> None:
    cast.play(Script((ScriptStep((97,)),), finish=None), Script((ScriptStep(error="it broke"),)))
    answer = server.http.post(CHAT, json=body(n=2, stream=streamed))
    if streamed:
        assert "it broke" in data_of(answer.text)[-1]
    else:
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "it broke"
    assert server.wait_for_idle()["referenced"] == 0


@pytest.mark.parametrize("second", [ScriptStep(error="it broke"), ScriptStep((98,), delay_s=0.01)])
def test_an_answer_of_choices_fails_once_and_says_nothing_after(
    cast: Cast, server: LiveServer, second: ScriptStep
) -> None:
    """All fail in one step, or one does while the others have more to say."""
    broken = ScriptStep(error="it broke", delay_s=0.01)
    cast.play(
        Script((ScriptStep((97,)), broken)), *[Script((ScriptStep((97,)), second, second))] * 3
    )
    frames = data_of(server.http.post(CHAT, json=body(n=4, stream=True)).text)
    assert ["error" in json.loads(frame) for frame in frames] == [False] * (len(frames) - 1) + [
        True
    ]
    assert server.wait_for_idle()["referenced"] == 0


def test_a_refused_answer_leaves_nothing_behind(cast: Cast) -> None:
    cast.play(Script(finish=None))
    with run_server(script_for=cast, max_open=2) as small:
        answer = small.http.post(CHAT, json=body(n=3))
        assert answer.status_code == 503
        assert small.wait_for_idle()["referenced"] == 0


def test_fields_reach_the_engine(cast: Cast, server: LiveServer) -> None:
    cast.play(text_script("x"))
    ask(
        server,
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={str(VOCAB - 1): 5, "3": -100, "4": 0},
        allowed_token_ids=[1, 2],
        min_tokens=3,
        include_stop_str_in_output=True,
        prompt_logprobs=2,
        service_tier="flex",
        best_of=1,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        user="u",
        metadata={"a": "b"},
        store=False,
        prediction={"type": "content", "content": "x"},
    )
    (sampling,) = cast.sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == ((VOCAB - 1, 5.0), (3, -100.0))
    assert sampling.allowed_token_ids == (1, 2)
    assert sampling.min_tokens == 3
    assert sampling.include_stop
    assert sampling.prompt_logprobs == 2
    assert cast.requests[0].priority == 1


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "DEF"}, "ABC", "DEF"),
        ({"stop": ["X", "DEF"], "include_stop_str_in_output": True}, "ABCDEF", "DEF"),
        ({"stop_token_ids": [ord("D")]}, "ABC", ord("D")),
        ({}, "ABCDEFG", None),
    ],
)
def test_what_stopped_it_is_said(
    cast: Cast, server: LiveServer, fields: dict[str, Any], text: str, reason: str | int | None
) -> None:
    cast.play(text_script("ABCDEFG"))
    (choice,) = ask(server, **fields)["choices"]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert choice.get("stop_reason") == reason
    last = stream(server, **fields)[-1]["choices"][0]
    assert last.get("stop_reason") == reason


def test_prompt_logprobs_have_an_entry_for_every_token(cast: Cast, server: LiveServer) -> None:
    cast.play(text_script("x"))
    answer = ask(server, n=2, prompt_logprobs=1, return_token_ids=True)
    first, *rest = answer["prompt_logprobs"]
    ids = answer["prompt_token_ids"]
    assert ids == unpack_tokens(cast.requests[0].token_ids).tolist()
    assert first is None and len(rest) == len(ids) - 1
    for token_id, entry in zip(ids[1:], rest, strict=True):
        assert entry[str(token_id)]["logprob"] == 0.0
    assert [sampling.prompt_logprobs for sampling in cast.sampling] == [1, None]


def test_logprobs_of_every_choice(cast: Cast, server: LiveServer) -> None:
    cast.play(text_script("ab"), text_script("cde"))
    answer = ask(server, n=2, logprobs=True, top_logprobs=1)
    names = [[t["token"] for t in c["logprobs"]["content"]] for c in answer["choices"]]
    assert names == [["a", "b"], ["c", "d", "e"]]


@pytest.mark.parametrize(
    ("tier", "shown"), [("auto", "default"), ("flex", "flex"), ("fast", "priority")]
)
def test_the_tier_that_was_used_is_echoed(
    cast: Cast, server: LiveServer, tier: str, shown: str
) -> None:
    cast.play(text_script("x"))
    assert ask(server, service_tier=tier)["service_tier"] == shown
    assert stream(server, service_tier=tier)[0]["service_tier"] == shown
    assert "service_tier" not in ask(server)

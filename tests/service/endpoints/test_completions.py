"""`POST /v1/completions`: prompts of every kind, echo, log-probabilities, and what is refused."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from engine.scripted import text_script
from engine.types import unpack_tokens
from service.dialects import completions_decode
from service.model_card import ModelCard
from tests.service.calls import data_of
from tests.service.conftest import CONTEXT, INFO, MODEL, VOCAB, LiveServer, run_server
from tests.service.test_choices import Cast

URL = "/v1/completions"
SAID = "naïve 😸 END tail"


@pytest.fixture(scope="module")
def cast() -> Cast:
    return Cast()


@pytest.fixture(scope="module")
def server(cast: Cast) -> Iterator[LiveServer]:
    cast.play(text_script(SAID, 3))
    with run_server(script_for=cast) as running:
        yield running


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def fields(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Say", "max_tokens": 50, **changes}


def ask(server: LiveServer, **changes: Any) -> dict[str, Any]:
    answer = server.http.post(URL, json=fields(**changes))
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def stream(server: LiveServer, **changes: Any) -> list[Any]:
    answer = server.http.post(URL, json=fields(stream=True, **changes))
    assert answer.status_code == 200, answer.text
    *frames, done = data_of(answer.text)
    assert done == "[DONE]"
    return [json.loads(frame) for frame in frames]


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream: by index its text, log-probabilities and end."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": {}})
    for chunk in chunks:
        for choice in chunk["choices"]:
            kept = choices[choice["index"]]
            kept["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                kept["logprobs"].setdefault(name, []).extend(values)
            if choice["finish_reason"] is not None:
                assert "finish_reason" not in kept
                kept["finish_reason"] = choice["finish_reason"]
    return choices


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2, 256], [[1, 2, 256]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("<|im_start|>x", [[256, 120]]),
    ],
)
def test_prompts_of_every_kind(
    cast: Cast, server: LiveServer, prompt: Any, expected: list[list[int]]
) -> None:
    cast.requests.clear()
    answer = ask(server, prompt=prompt, return_token_ids=True)
    sent = [unpack_tokens(request.token_ids).tolist() for request in cast.requests]
    assert sent == expected
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected
    assert [choice["text"] for choice in answer["choices"]] == [SAID] * len(expected)
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_sixteen_tokens_unless_said_otherwise(cast: Cast, server: LiveServer) -> None:
    cast.requests.clear()
    answer = ask(server, max_tokens=None)
    assert cast.sampling[0].max_tokens == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_streamed_and_whole_answers_agree(
    server: LiveServer, echo: bool, logprobs: int | None
) -> None:
    changes = {"echo": echo, "logprobs": logprobs, "n": 2, "stop": "END", "prompt": ["é", "b"]}
    whole = ask(server, **changes)
    choices = joined(stream(server, **changes))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for index, choice in enumerate(whole["choices"]):
        said = SAID.split("END")[0]
        assert choice["text"] == (["é", "b"][index // 2] + said if echo else said)
        assert choice["text"] == choices[index]["text"]
        assert (choice["logprobs"] or {}) == choices[index]["logprobs"]
        assert choice["finish_reason"] == choices[index]["finish_reason"] == "stop"
        assert choice["stop_reason"] == "END"


def test_log_probabilities_of_an_echoed_prompt(server: LiveServer) -> None:
    (choice,) = ask(server, prompt="aé", echo=True, logprobs=1, max_tokens=3)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "aéna\ufffd"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "n", "a", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [None, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert logprobs["top_logprobs"][:2] == [None, {"bytes:\\xc3": 0.0}]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]


def test_a_prompt_can_be_scored_without_an_answer(server: LiveServer) -> None:
    changes = {"prompt": [[97], [98, 99]], "echo": True, "logprobs": 0, "max_tokens": 0}
    whole = ask(server, **changes)
    assert [choice["text"] for choice in whole["choices"]] == ["a", "bc"]
    assert whole["choices"][1]["logprobs"]["token_logprobs"] == [None, 0.0]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
    assert whole["usage"]["completion_tokens"] == 0
    choices = joined(stream(server, **changes))
    assert [choices[i]["logprobs"] for i in range(2)] == [c["logprobs"] for c in whole["choices"]]


def test_prompt_logprobs_stand_beside_an_echo(server: LiveServer) -> None:
    (choice,) = ask(server, prompt="ab", echo=True, logprobs=3, prompt_logprobs=0)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": 0.0, "rank": None, "decoded_token": "b"}},
    ]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": 0.0}


@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_is_told_once_and_last(server: LiveServer, include_usage: bool) -> None:
    changes = {"prompt": ["ab", "c"], "n": 2}
    usage = ask(server, **changes)["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 4 * len(SAID.encode())
    options = {"stream_options": {"include_usage": include_usage}}
    chunks = stream(server, **changes, **options)
    assert [i for i, c in enumerate(chunks) if c.get("usage")] == [len(chunks) - 1]
    assert chunks[-1]["usage"] == usage
    assert (chunks[-1]["choices"] == []) is include_usage


def test_the_sdk_reads_whole_answers(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=50, echo=True, logprobs=1, best_of=2
    )
    assert [choice.text for choice in answer.choices] == ["a" + SAID] * 2 + ["b" + SAID] * 2
    logprobs = answer.choices[3].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.tokens[:2] == ["b", "n"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2


def test_the_sdk_reads_streams(sdk: openai.OpenAI) -> None:
    texts: dict[int, str] = defaultdict(str)
    with sdk.completions.create(
        model=MODEL,
        prompt="Say",
        n=3,
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        seen = list(chunks)
    for chunk in seen:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: SAID, 1: SAID, 2: SAID}
    assert seen[-1].usage is not None
    assert seen[-1].usage.completion_tokens == 3 * len(SAID.encode())


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"prompt": None}, "invalid_type", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
        ({"prompt": ["a", 3]}, "invalid_type", "prompt[1]"),
        ({"prompt": [3, "a"]}, "invalid_type", "prompt[1]"),
        ({"prompt": [True]}, "invalid_type", "prompt[0]"),
        ({"prompt": [{}]}, "invalid_type", "prompt[0]"),
        ({"prompt": [[]]}, "invalid_value", "prompt[0]"),
        ({"prompt": [1, VOCAB]}, "invalid_value", "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "invalid_value", "prompt[1][1]"),
        ({"prompt": [[1], [2, None]]}, "invalid_type", "prompt[1][1]"),
        ({"prompt": ["a"] * 65}, "invalid_value", "prompt"),
        ({"prompt": ["a"] * 9, "n": 16}, "invalid_value", "n"),
        ({"prompt": "x" * CONTEXT}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * (CONTEXT * 20)}, "context_length_exceeded", "prompt"),
        ({"prompt": ["a", [1] * CONTEXT]}, "invalid_type", "prompt[1]"),
        ({"prompt": [[1], [1] * CONTEXT]}, "context_length_exceeded", "prompt[1]"),
        ({"prompt": "x" * (CONTEXT - 3)}, "context_length_exceeded", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"suffix": "x"}, "unsupported_value", "suffix"),
        ({"echo": 1}, "invalid_type", "echo"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_type", "logprobs"),
        ({"n": 17}, "invalid_value", "n"),
        ({"best_of": 10_000}, "invalid_value", "best_of"),
        ({"best_of": 2}, "unsupported_value", "best_of"),
        ({"stop": ["x"] * 10_000}, "invalid_value", "stop"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"logit_bias": {str(VOCAB): 1}}, "invalid_value", "logit_bias"),
        ({"min_tokens": 51}, "invalid_value", "min_tokens"),
        ({"structured_outputs": {"regex": "a"}}, "unsupported_value", "structured_outputs"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_refused_names_the_field(
    server: LiveServer, changes: dict[str, Any], code: str, param: str, streamed: bool
) -> None:
    answer = server.http.post(URL, json=fields(stream=streamed, **changes))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert ask(server)["choices"][0]["text"] == SAID


def test_what_is_missing_is_named(server: LiveServer) -> None:
    for name in ("model", "prompt"):
        given = fields()
        del given[name]
        error = server.http.post(URL, json=given).json()["error"]
        assert (error["code"], error["param"]) == ("missing_required_parameter", name)
    assert server.http.post(URL, json=fields(model="other")).status_code == 404


def test_the_edge_of_the_context(server: LiveServer) -> None:
    """Fault 49: the prompt and its answer may fill the context to the last token."""
    full = ask(server, prompt=[1] * (CONTEXT - 1), max_tokens=1)
    assert full["usage"]["total_tokens"] == CONTEXT
    over = server.http.post(URL, json=fields(prompt=[1] * CONTEXT, max_tokens=0))
    assert over.status_code == 400 and over.json()["error"]["param"] == "prompt"
    special = ask(server, prompt=[256, 257, 256], max_tokens=3)
    assert special["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", [[1, 2, 256], [[1, 2], [3]]])
def test_token_ids_are_an_array_once_they_are_read(prompt: list[Any]) -> None:
    """To make one of a million numbers takes 40 ms, which the event loop has not."""
    card = ModelCard.of(INFO, (MODEL,))
    request = completions_decode.decode(json.dumps(fields(prompt=prompt)).encode(), card)
    expected = prompt if isinstance(prompt[0], list) else [prompt]
    for read, ids in zip(request.prompts, expected, strict=True):
        assert isinstance(read, np.ndarray)
        assert read.dtype == np.int32
        assert read.tolist() == ids

"""vllm-project/vllm#55750: an offset of exactly the prompt's length trips an assertion, and every
later request gets 500. Lengths at and around each limit; the server goes on."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.scripted import text_script
from tests.service.conftest import CONTEXT, MODEL, LiveServer, run_server

START, END = 256, 257


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("ok")) as running:
        yield running


def status(server: LiveServer, prompt: Any, max_tokens: int, **fields: Any) -> int:
    """Of a completion, after which the server must answer as ever."""
    sent = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **fields}
    answer = server.http.post("/v1/completions", json=sent)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        if error["code"] == "context_length_exceeded":
            assert str(CONTEXT) in error["message"]
            assert str(len(prompt) + max_tokens) in error["message"]
    plain = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
    assert plain.status_code == 200
    return answer.status_code


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 100])
def test_a_prompt_and_its_answer_fit_exactly_or_not(
    server: LiveServer, over: int, max_tokens: int
) -> None:
    prompt = [97] * (CONTEXT - max_tokens + over)
    assert status(server, prompt, max_tokens) == (400 if over > 0 else 200)


@pytest.mark.parametrize("num_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_a_prompt_of_the_whole_context(server: LiveServer, num_tokens: int) -> None:
    """One token must be left, also where nothing is to be said."""
    expected = 200 if num_tokens < CONTEXT else 400
    assert status(server, [97] * num_tokens, 1) == expected
    assert status(server, [97] * num_tokens, 0, echo=True, logprobs=1) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"), [("", 400), ([], 400), ([START], 200), ([END, START], 200)]
)
def test_prompts_of_nothing_and_of_special_tokens(
    server: LiveServer, prompt: Any, expected: int
) -> None:
    assert status(server, prompt, 4) == expected

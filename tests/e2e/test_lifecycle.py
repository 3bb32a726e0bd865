"""Streams that end early, bad neighbours, and the pages afterwards."""

import json

import pytest

from tests.e2e.conftest import Server, serve
from tests.e2e.conversations import chat, system_prompt, text_of


def wait_for_idle(server: Server) -> dict[str, int]:
    """Ask until nothing runs; the test's timeout bounds it."""
    while True:
        pool = server.pool()
        if pool["running"] == 0 and pool["waiting"] == 0:
            return pool


def test_a_client_that_leaves_drops_its_references(server: Server) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Count from one to five hundred in words."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    before = server.pool()["num_output_tokens"]
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
    pool = wait_for_idle(server)
    assert pool["referenced"] == 0
    assert pool["free"] + pool["cached"] + pool["pinned"] == pool["total"]
    assert pool["num_output_tokens"] - before < 1500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("{", None),
        ("[]", None),
        ({"messages": [{"role": "user", "content": "x"}], "model": 7}, "model"),
        ({"messages": [], "model": "default"}, "messages"),
        (
            {"messages": [{"role": "nobody", "content": "x"}], "model": "default"},
            "messages[0].role",
        ),
        ({"messages": [{"role": "user", "content": 3}], "model": "default"}, "messages[0].content"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"seed": "soon"}, "seed"),
    ],
)
def test_bad_input_is_refused_by_name(
    server: Server, body: str | dict[str, object], param: str | None
) -> None:
    if isinstance(body, dict):
        good = {"messages": [{"role": "user", "content": "x"}], "model": "default"}
        body = json.dumps({**good, **body})
    answer = server.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert text_of(chat(server, system_prompt("after", 1), "Still there?"))


def test_a_prompt_over_the_context_is_told_both_numbers(server: Server) -> None:
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"model": "default", "messages": [{"role": "user", "content": "word " * context}]}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(context) in error["message"]


def test_an_impossible_start_is_one_sentence_and_no_traceback() -> None:
    with (
        pytest.raises(BaseException, match="does not exist") as caught,
        serve("--model", "nowhere"),
    ):
        pass
    assert "Traceback" not in str(caught.value)


def test_the_server_ends_with_its_streams_finished() -> None:
    """SIGTERM while a stream runs: the stream still gets its end (serve() checks the exit code)."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell a story."}],
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        serve("--kv-memory", "256MiB") as server,
        server.http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.process.terminate()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in rest)

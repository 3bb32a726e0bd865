"""can1357/oh-my-pi#5022, sgl-project/sglang#10012, #954: usage in two chunks with the cached tokens
only in the second, zero or missing usage in streams, input tokens missing in /v1/responses."""

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.scripted import Script, ScriptStep
from tests.service.calls import CHAT, body
from tests.service.conftest import MODEL, LiveServer, run_server
from tests.service.raw import chat_request, connected, read_until

SCRIPT = Script((ScriptStep((97, 98)), ScriptStep((99,))), num_cached_tokens=5)
OUTPUT = 3


def frames_of(text: str) -> list[dict[str, Any]]:
    """The JSON of every frame of an event stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def post(server: LiveServer, path: str, **fields: Any) -> str:
    answer = server.http.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("include", [None, True])
def test_a_chat_stream_tells_usage_once_and_whole(include: bool | None) -> None:
    with run_server(SCRIPT) as server:
        options = {} if include is None else {"stream_options": {"include_usage": include}}
        frames = frames_of(post(server, CHAT, **body(stream=True, **options)))
        whole = json.loads(post(server, CHAT, **body()))["usage"]
    told = [frame["usage"] for frame in frames if frame.get("usage")]
    assert whole["prompt_tokens_details"]["cached_tokens"] == 5
    assert whole["completion_tokens"] == OUTPUT and whole["prompt_tokens"] > 5
    assert told == [whole]
    assert frames[-1]["usage"] == whole
    assert bool(frames[-1]["choices"]) is (include is None), "where it was asked for, its own frame"


def test_a_cancelled_stream_leaves_its_usage_in_the_metrics() -> None:
    endless = Script((ScriptStep((97,), delay_s=0.002),), repeat=True)
    with run_server(endless) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=True)))
            read_until(sock, b"data: ", 4)
        (record,) = server.ended()
        text = server.http.get("/metrics").text
    assert record.usage is not None and record.usage.output_tokens >= 2
    told = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert told["vllm:request_generation_tokens_sum"] == record.usage.output_tokens
    assert told["vllm:request_prompt_tokens_sum"] == record.usage.prompt_tokens


def test_responses_tell_input_output_and_cached_tokens_in_both_forms() -> None:
    with run_server(SCRIPT) as server:
        whole = json.loads(post(server, "/v1/responses", input="hi"))["usage"]
        frames = frames_of(post(server, "/v1/responses", input="hi", stream=True))
    streamed = [f["response"]["usage"] for f in frames if f["type"] == "response.completed"]
    assert whole["input_tokens"] > 5 and whole["output_tokens"] == OUTPUT
    assert whole["input_tokens_details"]["cached_tokens"] == 5
    assert whole["total_tokens"] == whole["input_tokens"] + OUTPUT
    assert streamed == [whole]


def test_messages_tell_the_same_tokens_streamed_and_whole() -> None:
    fields = {"messages": body()["messages"], "max_tokens": 9}
    with run_server(SCRIPT) as server:
        whole = json.loads(post(server, "/v1/messages", **fields))["usage"]
        frames = frames_of(post(server, "/v1/messages", stream=True, **fields))
    (last,) = [frame["usage"] for frame in frames if frame["type"] == "message_delta"]
    assert whole["output_tokens"] == last["output_tokens"] == OUTPUT
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert {name: whole[name] for name in names} == {name: last[name] for name in names}
    assert whole["cache_read_input_tokens"] == 5

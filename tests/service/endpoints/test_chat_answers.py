"""Chat answers: streamed and whole ones agree, to the letter of the protocol."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason, TokenLogprobs
from tests.service.calls import CHAT, ask, body, content, data_of, joined, stream
from tests.service.conftest import CONTEXT, LiveServer, quick, run_server
from tests.service.endpoints.stage import Stage
from tests.service.raw import chat_request, connected, read_until

CAT = "😸"
HARD_TEXTS = [
    "naïve 😸 text",
    "👩‍👩‍👧‍👦 family",
    "e\u0301\u0323 marks",
    "日本語",
    "a\u2028b\u0085c",
]


def split(data: bytes, cuts: tuple[int, ...]) -> Script:
    """A script that says `data` in the pieces that `cuts` make of it."""
    edges = [0, *sorted(cuts), len(data)]
    steps = tuple(ScriptStep(tuple(data[a:b])) for a, b in itertools.pairwise(edges) if a != b)
    return Script(steps)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_any_two_way_split_gives_the_same_text(stage: Stage, server: LiveServer, text: str) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        stage.script = split(data, (cut,))
        frames = stream(server)
        assert joined(frames) == text
        pieces = [f["choices"][0]["delta"].get("content", "") for f in frames]
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=40)
@given(data=st.binary(max_size=24), cuts=st.sets(st.integers(0, 24)))
def test_streamed_pieces_joined_are_the_whole_answer(
    stage: Stage, server: LiveServer, data: bytes, cuts: set[int]
) -> None:
    stage.script = split(data, tuple(cut for cut in cuts if cut < len(data)))
    frames = stream(server)
    whole = ask(server)
    assert joined(frames) == content(whole) == data.decode(errors="replace")
    assert frames[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert frames[-1]["usage"] == whole["usage"]


def test_text_cut_inside_a_code_point_ends_with_one_replacement(
    stage: Stage, server: LiveServer
) -> None:
    stage.script = text_script(CAT)
    assert joined(stream(server, max_tokens=2)) == content(ask(server, max_tokens=2)) == "\ufffd"


def test_the_order_of_chunks(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("abc", 2)
    frames = stream(server)
    assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [f["choices"][0]["finish_reason"] for f in frames] == [None] * (len(frames) - 1) + [
        "stop"
    ]
    assert frames[-1]["choices"][0]["delta"] == {}
    shared = {(f["id"], f["created"], f["model"], f["system_fingerprint"]) for f in frames}
    assert len(shared) == 1
    assert {f["object"] for f in frames} == {"chat.completion.chunk"}


def test_usage_rides_on_the_finish_chunk_unless_asked_for_apart(
    stage: Stage, server: LiveServer
) -> None:
    stage.script = Script(text_script("abcd").steps, num_cached_tokens=7)
    whole = ask(server)
    written = whole["usage"]["prompt_tokens"] - 7
    details = {"cached_tokens": 7, "cache_write_tokens": written}
    assert whole["usage"]["prompt_tokens_details"] == details
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 4
    unasked = stream(server)
    assert [f["usage"] for f in unasked if "usage" in f] == [whole["usage"]]
    assert all(f["choices"] for f in unasked)
    asked = stream(server, stream_options={"include_usage": True})
    assert [f["usage"] for f in asked if "usage" in f] == [whole["usage"]]
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == whole["usage"]


def test_a_stop_string_never_leaks(stage: Stage, server: LiveServer) -> None:
    for size in (1, 2, 3, 5, 10):
        stage.script = text_script("ABCDEFGHIJ", size)
        assert joined(stream(server, stop=["DEFGHIJ"])) == "ABC"
        assert content(ask(server, stop="DEFGHIJ")) == "ABC"
        assert joined(stream(server, stop=["DEFGHIK"])) == "ABCDEFGHIJ"


def test_text_is_held_no_longer_than_a_stop_could_begin(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("ABCDEF", finish=None)
    said, data = "", b""
    with connected(server) as sock:
        sock.sendall(chat_request(body(stream=True, stop=["DEFGHIJ"])))
        while said != "ABC":
            data += read_until(sock, b"data: ")
            said = "".join(re.findall(r'"content":"(.*?)"', data.decode()))
            assert "ABC".startswith(said)
    stage.script = text_script("ABCDEFxyz")
    assert joined(stream(server, stop=["DEFGHIJ"])) == "ABCDEFxyz"


def test_length_is_the_finish_reason_at_max_tokens(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("abcdef", repeat=True)
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(server, **{name: 3})
        assert content(answer) == "abc"
        assert answer["choices"][0]["finish_reason"] == "length"
    assert content(ask(server, max_tokens=5, max_completion_tokens=2)) == "ab"


def test_without_max_tokens_all_the_context_left_may_be_used(
    stage: Stage, server: LiveServer
) -> None:
    stage.script = text_script("x", repeat=True)
    usage = ask(server)["usage"]
    assert usage["total_tokens"] == CONTEXT


def test_logprobs_for_each_token_streamed_or_not(stage: Stage, server: LiveServer) -> None:
    logprobs = (TokenLogprobs(-0.5, (97, 98), (-0.5, -1.5)), TokenLogprobs(-1e9, (99,), (-0.1,)))
    stage.script = Script((ScriptStep((97, 195), logprobs=logprobs), ScriptStep((182,))))
    whole = ask(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    frames = stream(server, logprobs=True, top_logprobs=2)
    entries = [
        entry
        for frame in frames
        for entry in (frame["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert entries == whole["content"]
    first, second, third = entries
    assert first["token"] == "a" and first["bytes"] == [97] and first["logprob"] == -0.5
    assert [t["token"] for t in first["top_logprobs"]] == ["a", "b"]
    assert second["bytes"] == [195] and second["logprob"] == -9999.0
    assert third["bytes"] == [182]
    assert ask(server)["choices"][0]["logprobs"] is None


def test_options_reach_the_engine(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    ask(
        server,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.1,
        seed=-1,
        stop="é",
        stop_token_ids=[3, 257],
        ignore_eos=True,
        priority=-3,
        cache_salt="mine",
        timeout=60,
    )
    request = stage.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.seed) == (0.1, 2**63 - 1)
    assert sampling.stop == ("é".encode(),) and sampling.stop_token_ids == (3, 257)
    assert sampling.ignore_eos
    assert (request.priority, request.salt) == (-3, "mine")
    assert request.deadline_ns > 0


def test_defaults_are_openais_and_seeds_differ(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    ask(server, temperature=None, top_p=None, stop=None, tools=None, n=None, top_k=-1)
    ask(server, frequency_penalty=0, logit_bias={"5": 0}, response_format={"type": "text"})
    first, second = stage.requests[-2:]
    assert first.sampling.temperature == 1.0
    assert (first.sampling.top_k, first.sampling.top_p) == (0, 1.0)
    assert first.sampling.seed != second.sampling.seed
    assert first.deadline_ns == 0


def test_content_parts_are_joined_and_extras_ignored(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    parts = [{"type": "text", "text": "one", "extra": 1}, {"type": "text", "text": "two"}]
    ask(server, messages=[{"role": "user", "content": parts}], unknown={"deep": [1]}, user="me")
    ask(server, messages=[{"role": "user", "content": "one\ntwo"}])
    first, second = stage.requests[-2:]
    assert first.token_ids == second.token_ids


def test_tools_are_part_of_the_prompt(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("x")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    plain = ask(server)["usage"]["prompt_tokens"]
    for choice in (None, "auto", "none"):
        with_tools = ask(server, tools=[tool], tool_choice=choice)["usage"]["prompt_tokens"]
        assert with_tools > plain + len("look_up")


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (Script((ScriptStep(error="the page pool is on fire"),)), 500, None),
        (Script(finish=FinishReason.ABORT), 503, "server_is_overloaded"),
        (Script(finish=FinishReason.DEADLINE), 408, "timeout"),
    ],
)
def test_what_fails_is_an_error_streamed_or_not(
    stage: Stage, server: LiveServer, script: Script, status: int, code: str | None
) -> None:
    stage.script = Script((ScriptStep((97,)), *script.steps), script.finish)
    whole = server.http.post(CHAT, json=body())
    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    streamed = server.http.post(CHAT, json=body(stream=True))
    assert streamed.status_code == 200
    frames = [json.loads(frame) for frame in data_of(streamed.text)]
    assert frames[-1] == whole.json()
    assert joined(frames[:-1]) == "a"


def test_a_timeout_ends_a_request_that_would_not_end(stage: Stage, server: LiveServer) -> None:
    stage.script = Script(finish=None)
    answer = server.http.post(CHAT, json=body(timeout=0.05))
    assert answer.status_code == 408
    assert answer.headers["x-should-retry"] == "false"
    assert server.records[-1].finish_reason is FinishReason.DEADLINE


def test_a_silent_stream_is_kept_alive_with_empty_chunks() -> None:
    script = Script((ScriptStep((97,), delay_s=0.5),))
    with run_server(script, settings=quick(keep_alive_s=0.05)) as server:
        frames = stream(server)
    empty = [f for f in frames[1:-1] if f["choices"][0]["delta"] == {"content": ""}]
    assert empty
    assert joined(frames) == "a"


def test_a_record_of_each_request(stage: Stage, server: LiveServer) -> None:
    stage.script = text_script("abc")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03"
    headers = {"traceparent": trace, "x-request-id": "mine-1"}
    before = len(server.records)
    answer = server.http.post(CHAT, json=body(stream=True), headers=headers)
    (record,) = server.ended(before + 1)[before:]
    assert answer.headers["x-request-id"] == record.request_id == "mine-1"
    assert record.traceparent == trace
    assert record.finish_reason is FinishReason.STOP
    assert record.usage is not None and record.usage.output_tokens == 3
    assert record.num_bytes == len(answer.content)
    edge = ["receive", "tokenize", "prepare", "dispatch"]
    assert [p.name for p in record.phases] == [*edge, "queue", "prefill", "decode", "stream"]
    assert record.start_ns < record.first_token_ns <= record.end_ns
    assert record.error_type is None and record.disconnected_ns == 0

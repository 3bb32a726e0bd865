"""Each dialect over real sockets: what is sent, what is read, and how each failure is told."""

import asyncio
import socket
import time
from typing import Any

import pytest

from loadtest.measure.sample import Kind, RequestError, Sample, Usage
from loadtest.run import find_model
from loadtest.transports import NAMES, Dialogue, Target, Transport, open_transport
from tests.loadtest.playing import Play, playing

STREAMED = tuple(name for name in NAMES if name != "chat-json")
TOOL = {"name": "search", "description": "Finds.", "parameters": {"type": "object"}}


def ask(name: str, play: Play, *, turns: int = 1, stall_s: float = 30.0) -> list[Sample]:
    """The samples of a dialogue's turns."""

    async def talk(url: str) -> list[Sample]:
        target = Target("played", url, "m", {"ignore_eos": True}, stall_s=stall_s)
        transport = open_transport(name, target)
        try:
            return await say(transport, Dialogue("s", "be brief", [TOOL]), turns)
        finally:
            await transport.close()

    with playing(play) as url:
        return asyncio.run(talk(url))


async def say(transport: Transport, dialogue: Dialogue, turns: int) -> list[Sample]:
    samples = []
    for turn in range(turns):
        dialogue.texts.append(f"question {turn}")
        sample = Sample("s", "", turn, 16, time.perf_counter())
        samples.append(sample)
        await transport.send(dialogue, sample)
        dialogue.texts.append(sample.text)
        dialogue.response_id = sample.response_id
    return samples


def fails(name: str, play: Play, stall_s: float = 30.0) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(name, play, stall_s=stall_s)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_read_with_its_usage(name: str) -> None:
    (sample,) = ask(name, Play())
    assert sample.text == "one two three"
    assert sample.usage == Usage(100, 3, 80)
    assert sample.finished
    assert not sample.findings()
    assert sample.bytes_up > 0 < sample.bytes_down
    assert sample.sent_s <= sample.piece_s[0] <= sample.piece_s[-1]
    assert len(sample.piece_s) == (3 if name in STREAMED else 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_request_has_prompt_limit_tools_and_extras(name: str) -> None:
    play = Play()
    ask(name, play)
    (body,) = play.bodies
    assert "be brief" in str(body)
    assert "question 0" in str(body)
    assert "search" in str(body["tools"])
    assert body["ignore_eos"] is True
    assert 16 in (body.get("max_tokens"), body.get("max_output_tokens"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "responses-ws"])
def test_the_whole_conversation_is_sent_again(name: str) -> None:
    play = Play()
    ask(name, play, turns=2)
    body = play.bodies[1]
    said = [message["content"] for message in body.get("messages") or body["input"]]
    assert said[-3:] == ["question 0", "one two three", "question 1"]


def test_a_websocket_turn_sends_only_what_is_new() -> None:
    play = Play()
    ask("responses-ws", play, turns=3)
    first, second, third = play.bodies
    assert "previous_response_id" not in first
    assert second["previous_response_id"] == "resp_1"
    assert third["previous_response_id"] == "resp_2"
    assert third["input"] == [{"role": "user", "content": "question 2"}]
    assert {body["stream_id"] for body in play.bodies} == {first["stream_id"]}


def test_dialogues_share_connections_but_never_a_lane() -> None:
    play = Play()

    async def talk(url: str) -> None:
        transport = open_transport("responses-ws", Target("played", url, "m"))
        dialogues = [Dialogue(str(number), "", ()) for number in range(9)]
        await asyncio.gather(*(say(transport, dialogue, 2) for dialogue in dialogues))
        for dialogue in dialogues:
            await transport.leave(dialogue)
        await transport.close()

    with playing(play) as url:
        asyncio.run(talk(url))
    lanes = {(body["connection"], body["stream_id"]) for body in play.bodies}
    assert len(lanes) == 9
    assert len({connection for connection, _ in lanes}) == 2


def test_a_fork_continues_its_parent_on_a_lane_of_its_own() -> None:
    play = Play()

    async def talk(url: str) -> None:
        transport = open_transport("responses-ws", Target("played", url, "m"))
        parent = Dialogue("parent", "", ())
        await say(transport, parent, 1)
        await say(transport, parent.fork("child"), 1)
        await transport.close()

    with playing(play) as url:
        asyncio.run(talk(url))
    parent, child = play.bodies
    assert child["previous_response_id"] == "resp_1"
    assert child["stream_id"] != parent["stream_id"]


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_that_just_stops_is_cut(name: str) -> None:
    assert fails(name, Play(ending="cut")).kind == Kind.CUT


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_of_keep_alives_and_empty_pieces_is_stalled(name: str) -> None:
    assert fails(name, Play(ending="stall"), stall_s=0.2).kind == Kind.STALLED


@pytest.mark.parametrize("name", STREAMED)
def test_an_answer_that_never_ends_is_given_up(name: str) -> None:
    error = fails(name, Play(ending="endless"))
    assert error.kind == Kind.ENDLESS
    assert "16 tokens were allowed" in str(error)


@pytest.mark.parametrize("name", STREAMED)
def test_an_error_inside_a_stream_is_told(name: str) -> None:
    error = fails(name, Play(ending="error"))
    assert error.kind == Kind.REPORTED
    assert "it broke" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, Kind.RATE_LIMITED),
        (503, Kind.OVERLOADED),
        (529, Kind.OVERLOADED),
        (400, Kind.REFUSED),
        (500, Kind.BROKEN),
    ],
)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "responses-ws"])
def test_a_refusal_is_told_by_its_status(name: str, status: int, kind: Kind) -> None:
    error = fails(name, Play(status=status))
    assert error.kind == kind
    assert "retry after 3" in str(error)


def test_a_refused_handshake_is_told() -> None:
    assert fails("responses-ws", Play(status=403)).kind == Kind.REFUSED


def test_a_target_that_never_answers_is_told_with_the_time_it_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RequestError, match=r"^no answer within 0\.2 s$"):
            asyncio.run(find_model(Target("silent", url, "", stall_s=0.2)))


@pytest.mark.parametrize("name", NAMES)
def test_nobody_listening_is_no_connection(name: str) -> None:
    with playing(Play()) as url:
        pass

    async def talk() -> None:
        transport = open_transport(name, Target("gone", url, "m"))
        try:
            await say(transport, Dialogue("s", "", ()), 1)
        finally:
            await transport.close()

    with pytest.raises(RequestError) as caught:
        asyncio.run(talk())
    assert caught.value.kind == Kind.CONNECT


def test_a_null_extra_takes_a_key_away() -> None:
    fields: dict[str, Any] = {"model": "m", "temperature": 0}
    assert (
        Target("t", "", "m", {"temperature": None, "x": 1}).body(fields) == b'{"model":"m","x":1}'
    )

"""Events told again: the same ones, with the same numbers, from wherever the reader was."""

import threading

import httpx
import pytest

from engine.scripted import Script, ScriptStep, text_script
from service.responses.log import CHUNK_ENTRIES
from tests.service.conftest import HELD_S, MODEL, quick
from tests.service.endpoints.responses.calls import PATH, events_of, serving
from tests.service.websocket import live as sockets

LONG = text_script("x" * 300 + "é😀\u2028", 1, delay_s=0.001)
SLOW = text_script("0123456789", 1, delay_s=0.01)


def test_a_replay_is_the_stream_event_for_event() -> None:
    with serving(LONG) as live:
        answer = live.post(stream=True, metadata={"a": "b"}, temperature=1, tools=[])
        told = events_of(answer.text)
        assert len(told) > CHUNK_ENTRIES
        response_id = told[0]["response"]["id"]
        assert live.replay(response_id) == told
        for after in (0, 1, 63, 64, 150, len(told) - 2):
            assert live.replay(response_id, after) == told[after + 1 :]
        assert live.replay(response_id, len(told) - 1) == live.replay(response_id, 10**9) == []
        assert live.get(response_id) == told[-1]["response"]
        raw = live.server.http.get(f"{PATH}/{response_id}?stream=true").text
        assert raw == answer.text


def test_json_and_stream_agree() -> None:
    with serving(LONG) as live:
        whole = live.create(temperature=0)
        assert live.get(whole["id"]) == whole
        streamed = live.replay(whole["id"])
        assert streamed[-1]["response"] == whole
        pieces = [e["delta"] for e in streamed if e["type"] == "response.output_text.delta"]
        assert "".join(pieces) == whole["output"][0]["content"][0]["text"]
        assert whole["created_at"] <= whole["completed_at"]


def test_two_readers_follow_a_running_response() -> None:
    with serving(SLOW) as live:
        response = live.create(background=True)
        ends: list[str] = []

        def follow() -> None:
            url = f"{live.server.url}{PATH}/{response['id']}?stream=true"
            ends.append(httpx.get(url, trust_env=False, timeout=30).text)

        threads = [threading.Thread(target=follow) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = live.replay(response["id"])
        assert [events_of(end) for end in ends] == [told, told]
        assert told[-1]["type"] == "response.completed"
        assert told[0]["response"]["status"] == response["status"] == "in_progress"


def test_a_silent_follower_is_kept_alive() -> None:
    silence = Script((ScriptStep(tuple(b"late"), delay_s=HELD_S),))
    asked = {"model": MODEL, "input": "hi", "stream": True, "background": True}
    with (
        serving(silence, quick(keep_alive_s=0.05)) as live,
        live.server.http.stream("POST", PATH, json=asked) as answer,
    ):
        told, is_held = "", True
        for piece in answer.iter_text():
            told += piece
            if is_held and told.count(": keep-alive\n\n") > 1:
                is_held = False
                live.server.go_on()
    assert events_of(told)[-1]["type"] == "response.completed"


@pytest.mark.anyio
async def test_what_a_socket_told_is_replayed_over_http() -> None:
    slow = Script((ScriptStep(tuple(b"late"), delay_s=0.2),))
    async with (
        sockets.serving(slow) as live,
        live.connect() as socket,
    ):
        frames = await sockets.turn(socket, stream_id="lane")
        for frame in frames:
            assert frame.pop("stream_id") == "lane"
        answer = live.server.http.get(
            f"{PATH}/{frames[0]['response']['id']}", params={"stream": "true"}
        )
        assert events_of(answer.text) == frames


@pytest.mark.anyio
async def test_a_chain_changes_its_transport() -> None:
    async with sockets.serving(text_script("ok")) as live, live.connect() as socket:
        first = (await sockets.turn(socket, input="one"))[-1]["response"]["id"]
        body = {"model": MODEL, "input": "two", "previous_response_id": first}
        second = live.server.http.post(PATH, json=body).json()
        await sockets.turn(socket, input="three", previous_response_id=second["id"])
        assert [word in live.prompts[2] for word in ("one", "two", "three")] == [True] * 3
        unkept = (await sockets.turn(socket, input="hush", store=False))[-1]["response"]["id"]
        assert live.server.http.get(f"{PATH}/{unkept}").status_code == 404
        body |= {"previous_response_id": unkept}
        refused = live.server.http.post(PATH, json=body)
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        frames = await sockets.turn(socket, input="go on", previous_response_id=unkept)
        assert frames[-1]["type"] == "response.completed"

"""Several requests in flight on one socket: side by side across lanes, in order within one."""

import json

import pytest

from engine.scripted import Script, text_script
from tests.service.conftest import held
from tests.service.websocket.live import (
    TERMINAL,
    Frame,
    by_lane,
    by_word,
    create,
    receive,
    said,
    serving,
    turn,
    until,
)

pytestmark = pytest.mark.anyio

SLOW = text_script("0123456789", 1, delay_s=0.01)


def ends(frames: list[Frame]) -> int:
    return sum(frame["type"] in TERMINAL for frame in frames)


async def test_two_lanes_interleave_and_each_is_whole() -> None:
    async with serving(held("0123456789")) as live, live.connect() as socket:
        await create(socket, stream_id="left")
        await create(socket)
        frames: list[Frame] = []
        while not said(frames, "left") or not said(frames):
            frames.append(await receive(socket))
        live.server.go_on()
        while ends(frames) < 2:
            frames.append(await receive(socket))
        lanes = by_lane(frames)
        assert set(lanes) == {"left", None}
        for lane, own in lanes.items():
            assert said(own, lane) == "0123456789"
            assert own[-1]["type"] == "response.completed"
            assert [frame["sequence_number"] for frame in own] == list(range(len(own)))
        first_end = next(i for i, frame in enumerate(frames) if frame["type"] in TERMINAL)
        before = by_lane(frames[:first_end])
        assert said(before["left"], "left")
        assert said(before[None])


async def test_one_lane_runs_its_turns_one_by_one_in_order() -> None:
    async with serving(SLOW) as live, live.connect() as socket:
        for number in range(3):
            await create(socket, stream_id="a", metadata={"number": str(number)})
        frames: list[Frame] = []
        while ends(frames) < 3:
            frames.append(await receive(socket))
        bounds = [
            (frame["type"], frame["response"]["metadata"]["number"])
            for frame in frames
            if frame["type"] in ("response.created", "response.completed")
        ]
        assert bounds == [
            (kind, str(number))
            for number in range(3)
            for kind in ("response.created", "response.completed")
        ]


async def test_a_refused_turn_waits_for_its_place_in_the_lane() -> None:
    async with serving(SLOW) as live, live.connect() as socket:
        await create(socket, stream_id="a")
        await create(socket, stream_id="a", temperature=99)
        await create(socket, stream_id="a")
        frames: list[Frame] = []
        while ends(frames) < 3:
            frames.append(await receive(socket))
        terminals = [frame["type"] for frame in frames if frame["type"] in TERMINAL]
        assert terminals == ["response.completed", "error", "response.completed"]
        assert {frame["stream_id"] for frame in frames} == {"a"}


async def test_the_seventeenth_waits_until_one_of_sixteen_has_ended() -> None:
    scripts = by_word(ends=SLOW, hangs=Script(finish=None), last=text_script("last"))
    async with serving(scripts) as live, live.connect() as socket:
        await create(socket, input="ends", stream_id="ends")
        for number in range(15):
            await create(socket, input="hangs", stream_id=f"hangs-{number}")
        await create(socket, input="last", stream_id="last")
        frames: list[Frame] = []
        await until(socket, "response.completed", frames, lane="last")
        created = [f["stream_id"] for f in frames if f["type"] == "response.created"]
        assert len(created) == 17
        assert created[-1] == "last"
        marks = [(frame["type"], frame["stream_id"]) for frame in frames]
        freed = marks.index(("response.completed", "ends"))
        assert freed < marks.index(("response.created", "last"))
        assert not any(frame["type"] == "error" for frame in frames)


async def test_a_connection_names_at_most_thirty_two_lanes() -> None:
    async with serving(text_script("ok")) as live, live.connect() as socket:
        for number in range(32):
            await turn(socket, stream_id=f"lane-{number}")
        (error,) = await turn(socket, stream_id="one.too_many")
        assert error["type"] == "error"
        assert error["status"] == 400
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert error["stream_id"] == "one.too_many"
        assert (await turn(socket))[-1]["type"] == "response.completed"
        assert (await turn(socket, stream_id="lane-7"))[-1]["type"] == "response.completed"


@pytest.mark.parametrize("stream_id", ["", "a b", "x" * 257, "ä", 7, ["a"], "a\n"])
async def test_a_bad_stream_id_is_refused_without_a_lane(stream_id: object) -> None:
    async with serving(text_script("ok")) as live, live.connect() as socket:
        (error,) = await turn(socket, stream_id=stream_id)
        assert error["error"]["code"] == "invalid_stream_id"
        assert error["error"]["param"] == "stream_id"
        assert "stream_id" not in error
        longest = "A-z_0.9" + "x" * 249
        assert (await turn(socket, stream_id=longest))[-1]["stream_id"] == longest


async def test_too_much_waiting_is_refused_as_overload() -> None:
    async with serving(Script(finish=None)) as live, live.connect() as socket:
        await create(socket)
        await until(socket, "response.in_progress")
        for _ in range(257):
            await create(socket)
        error = await receive(socket)
        assert (error["status"], error["error"]["code"]) == (503, "server_is_overloaded")
        await socket.send(json.dumps({"type": "nonsense"}))
        assert (await receive(socket))["error"]["param"] == "type"

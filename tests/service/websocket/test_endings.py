"""How turns and sockets end: clients that leave or do not read, engines that die, age, drain."""

import asyncio
import json
import socket as sockets

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.scripted import Script, ScriptStep, text_script
from service.endpoints.responses_socket import SocketLimits
from tests.service.conftest import held
from tests.service.websocket.live import (
    TERMINAL,
    Frame,
    by_word,
    create,
    one_after_another,
    receive,
    said,
    serving,
    turn,
    until,
)

pytestmark = pytest.mark.anyio

HANGS = Script(finish=None)
OK = text_script("ok")
SLOW = text_script("0123456789", 1, delay_s=0.02)


async def closed_with(code: int, client: ClientConnection) -> None:
    """The next that arrives is the server's close frame."""
    with pytest.raises(ConnectionClosed) as caught:
        await client.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == code


@pytest.mark.parametrize("way", ["close frame", "lost connection"])
async def test_a_client_that_leaves_takes_its_running_turns_along(way: str) -> None:
    silent = SocketLimits(max_silence_s=3600)  # so that no failed write tells of the end
    async with serving(HANGS, silent) as live:
        async with live.connect() as socket:
            for lane in ("a", "b"):
                await create(socket, stream_id=lane)
                await until(socket, "response.in_progress", lane=lane)
            await create(socket, stream_id="b")  # waits in its lane
            while live.server.pool()["running"] < 2:
                pass
            assert live.server.pool()["referenced"] > 0
            if way == "lost connection":
                socket.transport.abort()
        pool = live.server.wait_for_idle()
        assert pool["referenced"] == 0
        assert pool["num_requests"] == 2
        records = live.server.ended(2)
        assert [record.finish_reason for record in records] == ["abort", "abort"]
        assert all(record.disconnected_ns for record in records)


async def test_neighbours_notice_nothing_of_a_client_that_leaves() -> None:
    async with serving(SLOW) as live, live.connect() as stays:
        await create(stays)
        await until(stays, "response.in_progress")
        async with live.connect() as leaves:
            await create(leaves)
            await until(leaves, "response.in_progress")
            leaves.transport.abort()
        frames: list[Frame] = []
        await until(stays, "response.completed", frames)
        assert said(frames) == "0123456789"


async def test_an_engine_that_dies_ends_every_turn_exactly_once() -> None:
    crash = Script((*text_script("before").steps, ScriptStep(crash="the engine's fault")))
    scripts = by_word(hangs=HANGS, crashes=crash)
    async with serving(scripts) as live, live.connect() as socket:
        await create(socket, input="hangs", stream_id="a")
        await until(socket, "response.in_progress", lane="a")
        await create(socket, input="hangs", stream_id="b")
        await create(socket, input="hangs", stream_id="b")
        await until(socket, "response.in_progress", lane="b")
        await create(socket, input="crashes")
        frames: list[Frame] = []
        while sum(frame["type"] in TERMINAL for frame in frames) < 4:
            frames.append(await receive(socket))
        ends = sorted(
            (frame.get("stream_id", ""), frame["type"])
            for frame in frames
            if frame["type"] in TERMINAL
        )
        assert ends == [
            ("", "response.failed"),
            ("a", "response.failed"),
            ("b", "error"),
            ("b", "response.failed"),
        ]
        (failed,) = [
            frame["response"]
            for frame in frames
            if frame["type"] == "response.failed" and "stream_id" not in frame
        ]
        assert failed["error"]["code"] == "server_error"
        assert failed["output"][0]["content"][0]["text"] == said(frames) == "before"
        (error,) = await turn(socket)
        assert (error["status"], error["error"]["code"]) == (503, "server_is_overloaded")
        assert int(error["error"]["headers"]["retry-after-ms"]) > 0
        assert error["headers"] == error["error"]["headers"]


async def test_one_request_that_fails_in_the_engine_fails_alone() -> None:
    broken = Script((ScriptStep(error="bad page"),))
    async with serving(by_word(bad=broken, good=OK)) as live, live.connect() as socket:
        frames = await turn(socket, input="bad")
        assert frames[-1]["type"] == "response.failed"
        assert said(await turn(socket, input="good")) == "ok"


async def test_a_slow_reader_stops_only_itself_and_loses_nothing() -> None:
    piece = b"%06d" % 0 + b"x" * 4000
    steps = tuple(ScriptStep((7,), text=b"%06d" % number + piece[6:]) for number in range(4000))
    scripts = by_word(big=Script(steps), small=OK)
    small_buffers = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM)
    small_buffers.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 16 << 10)
    small_buffers.setblocking(False)
    async with serving(scripts) as live:
        address = ("127.0.0.1", live.server.port)
        await asyncio.get_running_loop().sock_connect(small_buffers, address)
        # One frame in the client's queue: each may be a megabyte of tokens that came together.
        async with live.connect(sock=small_buffers, max_size=None, max_queue=1) as slow:
            await create(slow, input="big")
            await until(slow, "response.in_progress")
            num_before, num_quick = -1, 0
            while (num_now := live.server.pool()["num_output_tokens"] - num_quick) != num_before:
                num_before = num_now
                async with live.connect() as quick:
                    assert said(await turn(quick, input="small")) == "ok"
                num_quick += 2
            assert num_now < 1500
            frames: list[Frame] = []
            await until(slow, "response.completed", frames)
        text = said(frames)
        assert len(text) == 4000 * len(piece)
        assert [text[i : i + 6] for i in range(0, len(text), len(piece))] == [
            f"{number:06d}" for number in range(4000)
        ]


async def test_an_old_connection_finishes_its_turns_says_why_and_closes() -> None:
    slow = text_script("0123456789", 1, delay_s=0.12)
    limits = SocketLimits(max_age_s=1.0)
    async with serving(slow, limits) as live, live.connect() as socket:
        frames = await turn(socket, stream_id="a")
        assert frames[-1]["type"] == "response.completed"
        assert said(frames, "a") == "0123456789"
        error = await receive(socket)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert "stream_id" not in error
        await closed_with(1001, socket)
        async with live.connect() as fresh:
            await create(fresh)
            assert (await receive(fresh))["type"] == "response.created"


async def test_an_old_connection_starts_nothing_new() -> None:
    slow = text_script("0123456789", 1, delay_s=0.12)
    limits = SocketLimits(max_age_s=1.0)
    async with serving(slow, limits) as live, live.connect() as socket:
        await create(socket)
        frames: list[Frame] = []
        await until(socket, "response.in_progress")
        await create(socket)
        while sum(frame["type"] in TERMINAL for frame in frames) < 2:
            frames.append(await receive(socket))
        ends = [frame for frame in frames if frame["type"] in TERMINAL]
        assert ends[0]["type"] == "response.completed"
        assert ends[1]["error"]["code"] == "websocket_connection_limit_reached"
        assert live.server.pool()["num_requests"] == 1


async def test_a_drain_lets_running_turns_finish_and_closes_with_1012() -> None:
    scripts = one_after_another(OK, held("0123456789"))
    async with serving(scripts) as live, live.connect() as socket, live.connect() as idle:
        await turn(idle)
        await create(socket, stream_id="a")
        await until(socket, "response.in_progress", lane="a")
        await create(socket, stream_id="a")
        live.server.stop()
        await closed_with(1012, idle)
        with pytest.raises(InvalidStatus) as caught:
            async with live.connect():
                pass
        assert caught.value.response.status_code == 503
        assert json.loads(caught.value.response.body)["error"]["code"] == "server_is_overloaded"
        live.server.go_on()
        frames: list[Frame] = []
        while sum(frame["type"] in TERMINAL for frame in frames) < 2:
            frames.append(await receive(socket))
        ends = [frame for frame in frames if frame["type"] in TERMINAL]
        assert [frame["type"] for frame in ends] == ["response.completed", "error"]
        assert said(frames, "a") == "0123456789"
        assert (ends[1]["status"], ends[1]["error"]["code"]) == (503, "server_is_overloaded")
        await closed_with(1012, socket)


async def test_trace_context_and_chain_reach_the_record() -> None:
    handshake = "00-11111111111111111111111111111111-2222222222222222-01"
    nearer = "00-33333333333333333333333333333333-4444444444444444-01"
    async with serving(OK) as live:
        headers = {"traceparent": handshake}
        async with live.connect(additional_headers=headers) as socket:
            first = await turn(socket)
            parent = first[-1]["response"]["id"]
            client_metadata = {"ws_request_header_traceparent": nearer}
            second = await turn(
                socket, previous_response_id=parent, client_metadata=client_metadata
            )
            frames = [json.dumps(frame) for frame in second]
        one, two = live.server.ended(2)
        assert (one.traceparent, two.traceparent) == (handshake, nearer)
        assert one.response_id == one.conversation_id == two.conversation_id == parent
        assert two.previous_response_id == parent
        assert two.num_frames == len(frames)
        assert two.num_bytes > 1000
        assert two.usage is not None
        assert [phase.name for phase in two.phases][:3] == ["receive", "lane", "tokenize"]
        assert all(phase.start_ns <= phase.end_ns for phase in two.phases)

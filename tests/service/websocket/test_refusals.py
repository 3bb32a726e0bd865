"""Bad input over a real socket: a clear error event, and the socket and its neighbours live on."""

import json
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from engine.scripted import text_script
from tests.service.conftest import quick
from tests.service.websocket.live import create, receive, said, serving, turn

pytestmark = pytest.mark.anyio

OK = text_script("ok")


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("", "invalid_json", None),
        ("[1]", "invalid_type", None),
        ("{}", "missing_required_parameter", "type"),
        ('{"type": 3}', "invalid_type", "type"),
        ('{"type": "session.update"}', "invalid_value", "type"),
        ('{"type": "response.steer"}', "missing_required_parameter", "previous_response_id"),
        (b'{"type": "response.create"}', "invalid_type", None),
        (b"\xff\x00", "invalid_type", None),
    ],
)
async def test_what_is_no_message_is_answered_and_the_socket_stays(
    message: str | bytes, code: str, param: str | None
) -> None:
    async with serving(OK) as live, live.connect() as socket:
        await socket.send(message)
        error = await receive(socket)
        assert error["type"] == "error"
        assert error["status"] == 400
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"]
        assert said(await turn(socket)) == "ok"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"input": [{"role": "user", "content": 1}]}, 400, "invalid_type", "input[0].content"),
        ({"input": [{"type": "song"}]}, 400, "invalid_value", "input[0].type"),
        ({"input": []}, 400, "missing_required_parameter", "input"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"max_tokens": 5}, 400, "unknown_parameter", "max_tokens"),
        ({"background": True}, 400, "unsupported_value", "background"),
        ({"input": "x" * 9000}, 400, "context_length_exceeded", "input"),
        ({"max_output_tokens": 9000}, 400, "context_length_exceeded", "max_output_tokens"),
        (
            {"previous_response_id": "resp_0"},
            400,
            "previous_response_not_found",
            "previous_response_id",
        ),
    ],
)
async def test_a_refused_create_is_one_error_event_on_its_lane(
    body: dict[str, Any], status: int, code: str, param: str
) -> None:
    async with serving(OK) as live, live.connect() as socket:
        frames = await turn(socket, stream_id="a", **body)
        assert [frame["type"] for frame in frames] == ["error"]
        error = frames[0]
        assert (error["status"], error["stream_id"]) == (status, "a")
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        assert said(await turn(socket, stream_id="a"), "a") == "ok"
        assert live.server.pool()["num_requests"] == 1


async def test_an_unknown_type_is_told_those_there_are() -> None:
    async with serving(OK) as live, live.connect() as socket:
        await socket.send('{"type": "response.creat"}')
        error = await receive(socket)
        assert "response.create, response.steer or" in error["error"]["message"]


async def test_a_bad_neighbour_on_the_same_socket_disturbs_nobody() -> None:
    slow = text_script("undisturbed", 1, delay_s=0.01)
    async with serving(slow) as live, live.connect() as socket:
        await create(socket, stream_id="good")
        for message in ("{", b"\x00", '{"type": "?"}', '{"type": "response.create"}'):
            await socket.send(message)
        frames = [await receive(socket)]
        while frames[-1]["type"] != "response.completed":
            frames.append(await receive(socket))
        assert said(frames, "good") == "undisturbed"
        assert sum(frame["type"] == "error" for frame in frames) == 4


async def test_acknowledgements_are_ignored() -> None:
    async with serving(OK) as live, live.connect() as socket:
        await socket.send(json.dumps({"type": "response.processed", "response_id": "resp_1"}))
        assert said(await turn(socket)) == "ok"


async def test_a_frame_over_the_limit_closes_with_1009() -> None:
    async with serving(OK, settings=quick(ws_frame_bytes=4096)) as live:
        async with live.connect() as socket:
            await create(socket, input="x" * 5000)
            with pytest.raises(ConnectionClosedError) as caught:
                await receive(socket)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1009
        async with live.connect() as socket:
            assert said(await turn(socket)) == "ok"


async def test_a_web_page_of_another_site_cannot_connect() -> None:
    async with serving(OK) as live:
        with pytest.raises(InvalidStatus) as caught:
            async with live.connect(origin="http://evil.example"):
                pass
        assert caught.value.response.status_code == 403
        assert json.loads(caught.value.response.body or b"")["error"]["code"]


async def test_a_plain_get_is_told_to_upgrade() -> None:
    async with serving(OK) as live, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"{live.server.url}/v1/responses")
        assert answer.status_code == 426

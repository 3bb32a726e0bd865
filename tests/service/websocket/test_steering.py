"""`response.steer`: input for a response that runs, its frames by the SDK's own types."""

import json
from typing import Any

import pytest
from openai.types.responses import (
    ResponseSteerAcceptedEvent,
    ResponseSteerFailedEvent,
    ResponseSteerPendingEvent,
)
from websockets.asyncio.client import ClientConnection

from engine.scripted import Script, text_script
from service.transport.steering import MAX_STEERS
from tests.service.conftest import held, quick
from tests.service.websocket.live import (
    Frame,
    create,
    one_after_another,
    receive,
    said,
    serving,
    turn,
    until,
)

pytestmark = pytest.mark.anyio

HANGS = text_script("so far", 3, finish=None)
NEVER = Script(finish=None)
AFTER = text_script("after that")
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ONE_CALL = text_script(CALL, 20)


async def steer(socket: ClientConnection, response_id: str, input: Any = "hurry") -> None:
    """Send a `response.steer`."""
    message = {"type": "response.steer", "previous_response_id": response_id, "input": input}
    await socket.send(json.dumps(message))


async def begun(socket: ClientConnection, **body: Any) -> str:
    """The id of a response that has begun to speak."""
    await create(socket, **body)
    lane = body.get("stream_id")
    seen: list[Frame] = []
    await until(socket, "response.output_text.delta", seen, lane)
    response_id: str = seen[0]["response"]["id"]
    return response_id


async def test_a_steered_response_ends_and_another_goes_on_from_it() -> None:
    async with serving(one_after_another(HANGS, AFTER)) as live, live.connect() as socket:
        first = await begun(socket, stream_id="lane", instructions="Be kind.", temperature=0.5)
        await steer(socket, first, [{"role": "user", "content": "In French."}])
        accepted = await until(socket, "response.steer.accepted", lane="lane")
        parsed = ResponseSteerAcceptedEvent.model_validate(accepted)
        assert parsed.steer.previous_response_id == first
        ended = (await until(socket, "response.incomplete", lane="lane"))["response"]
        assert ended["incomplete_details"] == {"reason": "steered"}
        assert ended["output"][0]["status"] == "incomplete"
        assert ended["usage"]["output_tokens"] >= 3
        frames: list[Frame] = []
        done = (await until(socket, "response.completed", frames, "lane"))["response"]
        assert [frame["type"] for frame in frames[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
        assert said(frames, "lane") == "after that"
        assert (done["previous_response_id"], done["instructions"]) == (first, "Be kind.")
        assert done["temperature"] == 0.5
        spoken = ended["output"][0]["content"][0]["text"]
        assert spoken and f"assistant\n{spoken}<|im_end|>" in live.prompts[1]
        assert live.prompts[1].index(spoken) < live.prompts[1].index("In French.")
        assert said(await turn(socket, previous_response_id=done["id"])) == "after that"


async def test_a_response_that_says_nothing_yet_is_steered_at_once() -> None:
    async with serving(one_after_another(NEVER, AFTER)) as live, live.connect() as socket:
        await create(socket)
        first = (await until(socket, "response.in_progress"))["response"]["id"]
        await steer(socket, first)
        frames: list[Frame] = []
        ended = (await until(socket, "response.incomplete", frames))["response"]
        assert ended["output"] == []
        await until(socket, "response.completed", frames)
        assert said(frames) == "after that"
        assert live.server.wait_for_idle()["running"] == 0


async def test_calls_are_not_cut_and_the_input_waits_for_what_they_return() -> None:
    call_held = held(CALL, len(CALL) - 1)
    async with serving(one_after_another(call_held, AFTER)) as live, live.connect() as socket:
        await create(socket, tools=[TOOL])
        seen: list[Frame] = []
        await until(socket, "response.output_item.added", seen)
        first = seen[0]["response"]["id"]
        for words in ("and in French", "please"):
            await steer(socket, first, words)
            await until(socket, "response.steer.accepted", seen)
        live.server.go_on()
        done = await until(socket, "response.completed", seen)
        call = done["response"]["output"][0]
        waiting = [await receive(socket), await receive(socket)]
        for frame in waiting:
            pending = ResponseSteerPendingEvent.model_validate(frame)
            assert pending.reason == "waiting_for_required_input"
            assert [each.to_dict() for each in pending.required_input] == [
                {"type": "function_call_output", "call_id": call["call_id"], "name": "look"}
            ]
        accepted = [frame["steer"]["id"] for frame in seen if "steer" in frame]
        assert [frame["steer"]["id"] for frame in waiting] == accepted
        wrong = {"previous_response_id": first, "input": "no output", "temperature": 9}
        assert (await turn(socket, **wrong))[-1]["type"] == "error"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
        frames = await turn(socket, previous_response_id=first, input=[output])
        assert said(frames) == "after that"
        prompt = live.prompts[-1]
        places = [prompt.index(each) for each in ("and in French", "please", "seen")]
        assert places == sorted(places)
        assert said(await turn(socket, previous_response_id=first, input=[output])) == "after that"
        assert "please" not in live.prompts[-1]


async def test_what_comes_before_a_normal_end_is_followed_too() -> None:
    """The response calls nothing and ends while its input is accepted."""
    async with serving(one_after_another(HANGS, HANGS, AFTER)) as live, live.connect() as socket:
        response = await begun(socket)
        for word in ("one", "two"):
            await steer(socket, response, word)
            await until(socket, "response.incomplete")
            seen: list[Frame] = []
            await until(socket, "response.output_text.delta", seen)
            response = seen[0]["response"]["id"]
        await until(socket, "response.completed")
        prompt = live.prompts[-1]
        assert prompt.index("one") < prompt.index("two")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([{"role": "assistant", "content": "no"}], "invalid_input"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "invalid_input"),
        ([{"type": "reasoning", "summary": []}], "invalid_input"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "invalid_input"),
        ([], "invalid_input"),
    ],
)
async def test_input_that_cannot_steer_goes_back(given: Any, code: str) -> None:
    async with serving(HANGS) as live, live.connect() as socket:
        response = await begun(socket)
        await steer(socket, response, given)
        failed = await until(socket, "response.steer.failed")
        assert (failed["error"]["code"], failed["steer"].get("id")) == (code, None)
        assert failed["steer"]["input"] == given


async def test_only_a_running_response_of_this_connection_is_steered() -> None:
    async with serving(one_after_another(AFTER, HANGS)) as live, live.connect() as socket:
        ended = (await turn(socket))[-1]["response"]["id"]
        running = await begun(socket)
        warm = (await turn(socket, generate=False, stream_id="w"))[-1]["response"]["id"]
        async with live.connect() as other:
            for target, code in (
                (ended, "response_already_completed"),
                (warm, "response_already_completed"),
                ("resp_none", "response_not_found"),
                (running, "response_not_found"),
            ):
                await steer(other, target)
                failed = await receive(other)
                assert failed["error"]["code"] == code, target
                assert failed["steer"] == {"previous_response_id": target, "input": "hurry"}


async def test_too_many_wait_no_longer() -> None:
    async with serving(held(CALL, len(CALL) - 1)) as live, live.connect() as socket:
        await create(socket, tools=[TOOL])
        seen: list[Frame] = []
        await until(socket, "response.output_item.added", seen)
        response = seen[0]["response"]["id"]
        for _ in range(MAX_STEERS + 1):
            await steer(socket, response)
        failed = await until(socket, "response.steer.failed")
        assert failed["error"]["code"] == "too_many_pending_steers"


async def test_a_successor_that_cannot_begin_gives_the_input_back() -> None:
    async with serving(HANGS) as live, live.connect() as socket:
        response = await begun(socket)
        await steer(socket, response, "x" * 5000)
        accepted = await until(socket, "response.steer.accepted")
        failed = await until(socket, "response.steer.failed")
        parsed = ResponseSteerFailedEvent.model_validate(failed)
        assert parsed.error.code == "successor_creation_failed"
        assert failed["steer"]["id"] == accepted["steer"]["id"]
        assert len(failed["steer"]["input"]) == 5000
        assert live.server.wait_for_idle()["running"] == 0


async def test_what_waits_on_a_socket_holds_its_bytes_until_it_ends() -> None:
    async with serving(ONE_CALL, settings=quick(request_bytes=4000)) as live:
        for _ in range(3):
            async with live.connect() as socket:
                await create(socket, tools=[TOOL])
                first = (await until(socket, "response.completed"))["response"]["id"]
                await steer(socket, first, "x" * 2000)
                await until(socket, "response.steer.failed")

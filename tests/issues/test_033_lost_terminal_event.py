"""openai/openai-agents-js#1128: a run over a WebSocket hangs after a tool's result, as the event
that ends the response never comes."""

import pytest

from engine.scripted import Script, ScriptStep, text_script
from tests.service.websocket.live import TERMINAL, one_after_another, serving, turn

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = text_script('<tool_call>{"name": "look", "arguments": {}}</tool_call>', 5)
DIES = Script((*text_script("so").steps, ScriptStep(crash="the engine's thread is gone")))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_every_turn_of_a_tool_loop_ends_also_when_the_engine_dies() -> None:
    scripts = one_after_another(*[CALL] * 10, DIES)
    async with serving(scripts) as live, live.connect() as socket:
        frames = await turn(socket, tools=[TOOL])
        for _ in range(9):
            response = frames[-1]["response"]
            assert response["status"] == "completed"
            output = {
                "type": "function_call_output",
                "call_id": response["output"][0]["call_id"],
                "output": "seen",
            }
            frames = await turn(
                socket, tools=[TOOL], input=[output], previous_response_id=response["id"]
            )
            assert [frame["type"] in TERMINAL for frame in frames].count(True) == 1
        last = frames[-1]["response"]
        output = {**output, "call_id": last["output"][0]["call_id"]}
        frames = await turn(socket, tools=[TOOL], input=[output], previous_response_id=last["id"])
        assert frames[-1]["type"] == "response.failed"
        assert (await turn(socket))[-1]["type"] == "error"

"""An agent's loop of tool calls: over one socket it sends what is new, over HTTP its history."""

import json
from typing import Any

import httpx
import msgspec
from websockets.sync.client import connect

from engine.scripted import Script, text_script
from tests.service.calls import data_of
from tests.service.conftest import INFO, MODEL, LiveServer, run_server

NUM_TURNS = 40
SYSTEM = {"role": "system", "content": "You are an agent. Rules:\n" + "Be exact, be brief. " * 1000}
QUESTION = {"role": "user", "content": "Look at all of it."}
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}
SEEN = "There is a table, and on it a lamp that burns. " * 4
SETTINGS = {"model": MODEL, "tools": [TOOL]}


def scripts() -> list[Script]:
    """A call in every turn, and an answer in the last."""
    calls = [
        f'<tool_call>{{"name": "look", "arguments": {{"at": {turn}}}}}</tool_call>'
        for turn in range(NUM_TURNS - 1)
    ]
    return [text_script(said, 8) for said in (*calls, "All seen.")]


def serve() -> Any:
    """A server for one loop after another."""
    info = msgspec.structs.replace(INFO, max_context=1 << 18, num_pages=1 << 15)
    return run_server(*scripts(), info=info)


def outputs(response: dict[str, Any]) -> list[dict[str, Any]]:
    """What the tools return for a response's calls."""
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": SEEN}
        for call in calls
    ]


def over_http(server: LiveServer) -> tuple[int, str, int]:
    """The loop with the full history in every turn: bytes sent, the answer, and turns."""
    history: list[Any] = [SYSTEM, QUESTION]
    num_bytes = num_turns = 0
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        while True:
            sent = json.dumps({**SETTINGS, "input": history, "stream": True}).encode()
            num_bytes += len(sent)
            num_turns += 1
            answer = client.post("/v1/responses", content=sent)
            *_, last = data_of(answer.text)
            response = json.loads(last.partition("data: ")[2])["response"]
            returned = outputs(response)
            if not returned:
                return num_bytes, response["output"][0]["content"][0]["text"], num_turns
            history += [*response["output"], *returned]


def over_socket(server: LiveServer) -> tuple[int, str, int]:
    """The same on one lane of a socket, with what is new in every turn."""
    new: list[Any] = [SYSTEM, QUESTION]
    previous: dict[str, Any] = {}
    num_bytes = num_turns = 0
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    with connect(url, proxy=None, max_size=None, compression=None) as socket:
        while True:
            sent = json.dumps({"type": "response.create", **SETTINGS, **previous, "input": new})
            num_bytes += len(sent)
            num_turns += 1
            socket.send(sent)
            event: dict[str, Any] = {"type": ""}
            while event["type"] not in ("response.completed", "error"):
                event = json.loads(socket.recv())
            response = event["response"]
            new = outputs(response)
            if not new:
                return num_bytes, response["output"][0]["content"][0]["text"], num_turns
            previous = {"previous_response_id": response["id"]}


def test_a_socket_sends_a_twentieth_of_what_full_histories_are() -> None:
    with serve() as server:
        full, answer, num_turns = over_http(server)
        new, same, as_many = over_socket(server)
        assert (answer, num_turns) == (same, as_many) == ("All seen.", NUM_TURNS)
        assert new * 20 <= full

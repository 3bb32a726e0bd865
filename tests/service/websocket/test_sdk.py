"""The unmodified `openai` SDK over WebSocket: connections, lanes, continuations, forks, errors."""

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketAccumulator,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)
from openai.resources.responses.responses import AsyncResponsesConnection, ResponsesConnection
from openai.types.responses import Response

from engine.scripted import text_script
from tests.service.conftest import MODEL, run_server
from tests.service.websocket.live import by_word, recording, serving

SCRIPTS = by_word(
    **{
        "In Spanish?": text_script("hola mundo", 2),
        "In French?": text_script("bonjour le monde", 2),
        "Say hello": text_script("hello world", 2, delay_s=0.002),
    }
)
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8,
    max_events_per_lane=1024,
    max_events=4096,
    max_bytes_per_lane=1 << 22,
    max_bytes=1 << 24,
)


def collect(connection: ResponsesConnection) -> Response:
    """One response of the default lane: the final object; the joined deltas are its text."""
    pieces: list[str] = []
    accumulator = ResponsesWebSocketAccumulator()
    for event in connection:
        accumulator.add_event(event)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        if event.type == "response.completed":
            assert "".join(pieces) == event.response.output_text
            assert accumulator.snapshot().output_text == event.response.output_text
            return event.response
    raise AssertionError("the connection ended before the response")


async def collect_async(connection: AsyncResponsesConnection) -> Response:
    pieces: list[str] = []
    async for event in connection:
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        if event.type == "response.completed":
            assert "".join(pieces) == event.response.output_text
            return event.response
    raise AssertionError("the connection ended before the response")


def test_the_sync_connection_continues_a_response() -> None:
    with (
        run_server(script_for=recording(SCRIPTS, [])) as live,
        OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model=MODEL, input="Say hello")
        first = collect(connection)
        assert first.output_text == "hello world"
        assert first.usage is not None
        assert first.usage.output_tokens == len("hello world")
        connection.response.create(
            model=MODEL, input="In French?", previous_response_id=first.id, temperature=0
        )
        second = collect(connection)
        assert second.output_text == "bonjour le monde"
        assert second.previous_response_id == first.id
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_the_sync_session_forks_on_another_lane() -> None:
    with (
        run_server(script_for=recording(SCRIPTS, [])) as live,
        OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        trunk, fork = session.lane("trunk"), session.lane("fork")
        trunk.send({"type": "response.create", "model": MODEL, "input": "Say hello"})
        root = trunk.get_final_response(timeout=20)
        for lane, question in ((trunk, "In French?"), (fork, "In Spanish?")):
            lane.send(
                {
                    "type": "response.create",
                    "model": MODEL,
                    "input": question,
                    "previous_response_id": root.id,
                }
            )
        assert fork.get_final_response(timeout=20).output_text == "hola mundo"
        assert trunk.get_final_response(timeout=20).output_text == "bonjour le monde"


@pytest.mark.anyio
async def test_the_async_connection_continues_a_response() -> None:
    async with (
        serving(SCRIPTS) as live,
        AsyncOpenAI(base_url=f"{live.server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        await connection.response.create(model=MODEL, input="Say hello")
        first = await collect_async(connection)
        await connection.response.create(
            model=MODEL,
            input=[{"role": "user", "content": "In Spanish?"}],
            previous_response_id=first.id,
        )
        assert (await collect_async(connection)).output_text == "hola mundo"


@pytest.mark.anyio
async def test_the_async_session_forks_a_running_response() -> None:
    async with (
        serving(SCRIPTS) as live,
        AsyncOpenAI(base_url=f"{live.server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        fork = session.lane("fork")
        await session.default.send(
            {"type": "response.create", "model": MODEL, "input": "Say hello"}
        )
        event = await session.default.recv()
        while event.type != "response.in_progress":
            event = await session.default.recv()
        await fork.send(
            {
                "type": "response.create",
                "model": MODEL,
                "input": "In French?",
                "previous_response_id": event.response.id,
            }
        )
        assert (await fork.get_final_response()).output_text == "bonjour le monde"
        assert (await session.default.get_final_response()).output_text == "hello world"


@pytest.mark.anyio
async def test_an_error_event_leaves_the_connection_usable() -> None:
    async with (
        serving(SCRIPTS) as live,
        AsyncOpenAI(base_url=f"{live.server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lane = session.lane("a")
        await lane.send(
            {
                "type": "response.create",
                "model": MODEL,
                "input": "Say hello",
                "previous_response_id": "resp_unknown",
            }
        )
        with pytest.raises(ResponsesWebSocketError) as caught:
            await lane.get_final_response()
        event = caught.value.event
        assert event.type == "error"
        assert event.error.code == "previous_response_not_found"
        await lane.send({"type": "response.create", "model": MODEL, "input": "Say hello"})
        assert (await lane.get_final_response()).output_text == "hello world"

"""The real `openai` SDK, unmodified, against the real model."""

import asyncio

import openai
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import Response

from tests.e2e.conftest import Server


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_streamed_pieces_joined_are_the_answer(server: Server) -> None:
    with client(server) as sdk:
        model = sdk.models.list().data[0].id
        ask: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours."}]
        whole = sdk.chat.completions.create(
            model=model,
            messages=ask,
            temperature=0,
            max_tokens=30,
        )
        chunks = list(
            sdk.chat.completions.create(
                model=model,
                messages=ask,
                temperature=0,
                max_tokens=30,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_async_chat(server: Server) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as sdk:
            stream = await sdk.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "Say hello."}],
                temperature=0,
                max_tokens=12,
                stream=True,
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    assert asyncio.run(ask())


def test_responses_over_websocket_with_a_continuation_and_a_fork(server: Server) -> None:
    with client(server) as sdk, sdk.responses.connect() as connection:

        def turn(text: str, previous: str | None, lane: str | None = None) -> Response:
            request: dict[str, object] = {
                "type": "response.create",
                "model": "default",
                "temperature": 0,
                "max_output_tokens": 24,
                "input": text,
            }
            if previous:
                request["previous_response_id"] = previous
            if lane:
                request["stream_id"] = lane
            connection.send(request)  # type: ignore[arg-type]
            deltas = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    deltas += event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    assert event.response.output_text == deltas
                    return event.response
                assert event.type != "error", event
            raise AssertionError("no terminal event")

        first = turn("My name is Ada. Remember it.", None)
        second = turn("What is my name?", first.id)
        fork = turn("Spell my name.", first.id, "fork")
    assert first.usage is not None and second.usage is not None and fork.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16
    assert fork.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16
    assert fork.previous_response_id == first.id

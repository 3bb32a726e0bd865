"""The `openai` SDK, unmodified, against a live server."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.scripted import Script, ScriptStep, text_script
from tests.service.conftest import MODEL, LiveServer, run_server

TEXT = "Streams of 😸 and naïve water"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script(TEXT, 3)) as running:
        yield running


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("org/other")
    assert missing.value.code == "model_not_found"


def test_whole_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1)
    (choice,) = answer.choices
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert b"".join(bytes(t.bytes or ()) for t in choice.logprobs.content) == TEXT.encode()
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_streamed_answer(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        seen = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in seen if c.choices) == TEXT
    assert [c.usage is not None for c in seen] == [False] * (len(seen) - 1) + [True]


def test_stream_helper_accumulates(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=HELLO) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_async_streams_side_by_side(server: LiveServer) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def whole(client: openai.AsyncOpenAI) -> str:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        return answer.choices[0].message.content or ""

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client) for ask in (one, whole) * 4))

    assert asyncio.run(all_of_them()) == [TEXT] * 8


def test_errors_have_the_class_and_fields_of_their_status(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "temperature")
    assert refused.value.request_id is not None
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as long:
        sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 10_000}]
        )
    assert long.value.code == "context_length_exceeded"


def test_a_stream_that_fails_midway_raises() -> None:
    script = Script((ScriptStep((97,)), ScriptStep(error="it broke")))
    with (
        run_server(script) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        chunks = sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        assert next(chunks).choices[0].delta.content == ""
        assert next(chunks).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="it broke") as failed:
            next(chunks)
    assert failed.value.type == "server_error"

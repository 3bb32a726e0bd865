"""The `anthropic` SDK, unmodified, against a live server."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason
from tests.service.conftest import CONTEXT, MODEL, LiveServer, run_server

TEXT = "Streams of 😸 and naïve water"
HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]
ASKED: Any = {"model": MODEL, "max_tokens": 64, "messages": HELLO}
WEATHER: ToolParam = {"name": "get_weather", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script(TEXT, 3)) as running:
        yield running


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: anthropic.Anthropic) -> None:
    (model,) = sdk.models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert (model.max_input_tokens, model.display_name) == (CONTEXT, MODEL)
    assert model.created_at.tzinfo is not None
    assert sdk.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError) as missing:
        sdk.models.retrieve("claude-nine")
    assert missing.value.type == "not_found_error"


def test_whole_answer(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(**ASKED, system="Be kind.", stop_sequences=["zzz"])
    (block,) = message.content
    assert block.type == "text" and block.text == TEXT
    assert (message.stop_reason, message.model) == ("end_turn", MODEL)
    assert message._request_id is not None and message._request_id.startswith("req_")


def test_count_tokens(sdk: anthropic.Anthropic) -> None:
    fields: Any = {"system": "Be kind.", "tools": [WEATHER]}
    counted = sdk.messages.count_tokens(model=MODEL, messages=HELLO, **fields)
    usage = sdk.messages.create(**ASKED, **fields).usage
    assert counted.input_tokens == usage.input_tokens


def test_raw_stream(sdk: anthropic.Anthropic) -> None:
    with sdk.messages.create(**ASKED, stream=True) as events:
        seen = list(events)
    kinds = [event.type for event in seen]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stream_helper(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(**ASKED)
    with sdk.messages.stream(**ASKED) as events:
        assert "".join(events.text_stream) == TEXT
        final = events.get_final_message()
        assert events.request_id is not None and events.request_id.startswith("req_")
    assert final.content[0].model_dump(exclude={"parsed_output"}) == whole.content[0].model_dump()
    whole.usage.cache_creation = None  # the SDK does not take it from a stream's last frame
    assert final.usage.model_dump() == whole.usage.model_dump()
    assert final.stop_reason == whole.stop_reason == "end_turn"


def test_beta_client(sdk: anthropic.Anthropic) -> None:
    message = sdk.beta.messages.create(**ASKED, betas=["unheard-of-2031-01-01"])
    (block,) = message.content
    assert block.type == "text" and block.text == TEXT


def test_a_tool_loop_goes_on(sdk: anthropic.Anthropic) -> None:
    """What the SDK sends back of a turn with a call is taken, thoughts and all."""
    turn: Any = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}},
    ]
    result: Any = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": turn},
        {"role": "user", "content": result},
    ]
    message = sdk.messages.create(
        model=MODEL, max_tokens=64, messages=messages, tools=[WEATHER], tool_choice={"type": "auto"}
    )
    (block,) = message.content
    assert block.type == "text" and block.text == TEXT
    again = sdk.messages.create(**{**ASKED, "messages": [*HELLO, message.to_param(), *HELLO]})
    assert again.content == message.content


def test_async_calls_side_by_side(server: LiveServer) -> None:
    async def streamed(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(**ASKED) as events:
            return "".join([text async for text in events.text_stream])

    async def raw(client: anthropic.AsyncAnthropic) -> str:
        events = await client.messages.create(**ASKED, stream=True)
        deltas = [event.delta async for event in events if event.type == "content_block_delta"]
        return "".join(delta.text for delta in deltas if delta.type == "text_delta")

    async def whole(client: anthropic.AsyncAnthropic) -> str:
        message = await client.messages.create(**ASKED)
        (block,) = message.content
        return block.text if block.type == "text" else ""

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="none") as client:
            return await asyncio.gather(*(ask(client) for ask in (streamed, raw, whole) * 3))

    assert asyncio.run(all_of_them()) == [TEXT] * 9


def test_errors_have_the_class_and_type_of_their_status(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        sdk.messages.create(**ASKED, extra_body={"temperature": 9})
    assert (refused.value.type, refused.value.error_code) == (
        "invalid_request_error",
        "invalid_value",
    )
    assert refused.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**{**ASKED, "model": "claude-nine"})
    long: list[MessageParam] = [{"role": "user", "content": "x" * 10_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        sdk.messages.create(**{**ASKED, "messages": long})


def test_a_stream_that_fails_midway_raises() -> None:
    script = Script((ScriptStep((97,)), ScriptStep(error="it broke")))
    with (
        run_server(script) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk,
        sdk.messages.stream(**ASKED) as events,
        pytest.raises(anthropic.APIStatusError, match="it broke") as failed,
    ):
        events.get_final_message()
    assert failed.value.type == "api_error"


def test_an_overload_is_retried() -> None:
    scripts = (Script(finish=FinishReason.ABORT), text_script("x"))
    with (
        run_server(*scripts) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=1) as sdk,
    ):
        (block,) = sdk.messages.create(**ASKED).content
        assert block.type == "text" and block.text == "x"
        server.ended(2)

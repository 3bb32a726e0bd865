"""Tool loops over a live server: the scripted engine decides the calls, the SDK reads them."""

import asyncio
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, ToolParam, ToolUseBlock

from engine.scripted import Script, text_script
from engine.types import EngineRequest, unpack_tokens
from tests.service.conftest import MODEL, LiveServer

WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FIRST = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
)
CALLS = f"{FIRST}\n{SECOND}"
ANSWER = "Rain in Köln, sun in Ulm."
QUESTION: Any = {"role": "user", "content": "Köln or Ulm?"}


class Stage:
    """Calls tools until the prompt holds their results; keeps what the engine was asked."""

    def __init__(self) -> None:
        self.tokens_per_step = 1
        self.requests: list[EngineRequest] = []

    def __call__(self, request: EngineRequest) -> Script:
        self.requests.append(request)
        answered = ANSWER if "it rains" in prompt_of(request) else CALLS
        return text_script(answered, self.tokens_per_step)


def prompt_of(request: EngineRequest) -> str:
    ids: list[int] = unpack_tokens(request.token_ids).tolist()
    return bytes(each for each in ids if each < 256).decode()


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


def results_for(message: Message) -> Any:
    """The results of a turn's calls, by tools that know two cities."""
    weather = {"Köln": "it rains", "Ulm": "the sun shines"}
    blocks = [block for block in message.content if isinstance(block, ToolUseBlock)]
    return {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": weather[str(block.input["city"])],
            }
            for block in blocks
        ],
    }


def ask(sdk: anthropic.Anthropic, messages: list[Any], streamed: bool) -> Message:
    asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [WEATHER]}
    if not streamed:
        answer: Message = sdk.messages.create(**asked)
        return answer
    with sdk.messages.stream(**asked) as events:
        final: Message = events.get_final_message()
        return final


@pytest.mark.parametrize("tokens_per_step", [1, 5, 1000])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop(
    stage: Stage, server: LiveServer, streamed: bool, tokens_per_step: int
) -> None:
    stage.tokens_per_step = tokens_per_step
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        called = ask(sdk, [QUESTION], streamed)
        assert called.stop_reason == "tool_use"
        calls = [block for block in called.content if isinstance(block, ToolUseBlock)]
        assert len(calls) == len(called.content) == 2
        assert [call.input for call in calls] == [{"city": "Köln"}, {"city": "Ulm", "days": 2}]
        assert all(call.id.startswith("toolu_") for call in calls)
        final = ask(sdk, [QUESTION, called.to_param(), results_for(called)], streamed)
    (block,) = final.content
    assert block.type == "text" and block.text == ANSWER
    assert final.stop_reason == "end_turn"
    first, second = stage.requests[-2:]
    assert prompt_of(second).startswith(prompt_of(first) + CALLS)


def test_a_tool_loop_of_the_async_client(stage: Stage, server: LiveServer) -> None:
    async def loop() -> Message:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as sdk:
            asked: Any = {"model": MODEL, "max_tokens": 500, "tools": [WEATHER]}
            async with sdk.messages.stream(**asked, messages=[QUESTION]) as events:
                called: Message = await events.get_final_message()
            turns = [QUESTION, called.to_param(), results_for(called)]
            final: Message = await sdk.messages.create(**asked, messages=turns)
            return final

    (block,) = asyncio.run(loop()).content
    assert block.type == "text" and block.text == ANSWER


def test_the_tool_runner_of_the_sdk(server: LiveServer) -> None:
    @anthropic.beta_tool
    def get_weather(city: str, days: int = 1) -> str:
        """The weather of a city.

        Args:
            city: Where.
            days: How many.
        """
        return f"it rains in {city} for {days}"

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        runner = sdk.beta.messages.tool_runner(
            model=MODEL, max_tokens=500, messages=[QUESTION], tools=[get_weather]
        )
        final = runner.until_done()
    (block,) = final.content
    assert block.type == "text" and block.text == ANSWER


def test_without_a_choice_of_tools_calls_are_text(stage: Stage, server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        message = sdk.messages.create(
            model=MODEL,
            max_tokens=500,
            messages=[QUESTION],
            tools=[WEATHER],
            tool_choice={"type": "none"},
        )
    (block,) = message.content
    assert block.type == "text" and block.text == CALLS
    assert message.stop_reason == "end_turn"


def test_a_call_that_is_cut_is_not_a_tool_use(stage: Stage, server: LiveServer) -> None:
    asked: Any = {"model": MODEL, "messages": [QUESTION], "tools": [WEATHER]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        message = sdk.messages.create(**asked, max_tokens=len(FIRST) - 20)
    assert message.stop_reason == "max_tokens"

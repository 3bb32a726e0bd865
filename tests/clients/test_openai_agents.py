"""The openai-agents SDK, unmodified: tools, hand-offs, chains, streams over its three models."""

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.exceptions import ModelBehaviorError
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from tests.service.conftest import MODEL, LiveServer

pytestmark = pytest.mark.anyio
ModelOf: TypeAlias = Callable[[AsyncOpenAI], Model]
QUIET = RunConfig(tracing_disabled=True)
MODELS: dict[str, ModelOf] = {
    "chat": lambda client: OpenAIChatCompletionsModel(MODEL, client),
    "responses": lambda client: OpenAIResponsesModel(MODEL, client),
    "websocket": lambda client: OpenAIResponsesWSModel(MODEL, client),
}


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class Place(BaseModel):
    city: str
    degrees: int


@pytest.fixture(params=MODELS)
async def model(request: pytest.FixtureRequest, server: LiveServer) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = MODELS[request.param](client)
        yield made
        await made.close()


async def test_a_tool_is_called_and_its_result_told(model: Model) -> None:
    agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
    result = await Runner.run(agent, "weather in Paris?", run_config=QUIET)
    assert "sunny in Paris" in result.final_output
    assert len(result.raw_responses) == 2
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.output_tokens > 0
    assert usage.input_tokens > usage.output_tokens


async def test_two_calls_of_one_turn(model: Model) -> None:
    agent = Agent(name="a", model=model, tools=[weather])
    result = await Runner.run(agent, "weather in Paris and Rome?", run_config=QUIET)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["sunny in Paris", "sunny in Rome"]


async def test_a_streamed_run(model: Model) -> None:
    agent = Agent(name="a", model=model, tools=[weather])
    result = Runner.run_streamed(agent, "weather in Oslo?", run_config=QUIET)
    text = ""
    kinds = set()
    async for event in result.stream_events():
        kinds.add(event.type)
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert "raw_response_event" in kinds
    assert "run_item_stream_event" in kinds
    assert text == result.final_output
    assert "sunny in Oslo" in text


async def test_one_agent_hands_over_to_another(model: Model) -> None:
    """Two agents with a real tool each end with the tool's result in the answer."""
    writer = Agent(name="writer", instructions="Write.", model=model, tools=[weather])
    first = Agent(name="first", instructions="Pass on.", model=model, handoffs=[writer])
    over = await Runner.run(first, "hand over", run_config=QUIET)
    assert over.last_agent is writer
    history = over.to_input_list()
    result = await Runner.run(
        over.last_agent,
        [*history, {"role": "user", "content": "weather in Bern?"}],
        run_config=QUIET,
    )
    assert "sunny in Bern" in result.final_output


async def test_structured_output(model: Model) -> None:
    agent = Agent(name="a", model=model, output_type=Place)
    result = await Runner.run(agent, "A place as JSON", run_config=QUIET)
    assert result.final_output == Place(city="Paris", degrees=21)


async def test_what_is_refused_is_an_error_and_the_next_run_goes_on(model: Model) -> None:
    wrong = Agent(name="a", model=model, model_settings=ModelSettings(temperature=9.0))
    with pytest.raises((BadRequestError, ModelBehaviorError, RuntimeError), match="temperature"):
        await Runner.run(wrong, "hi", run_config=QUIET)
    right = Agent(name="a", model=model)
    result = await Runner.run(right, "hi", run_config=QUIET)
    assert result.final_output == "You (user) said: hi"


@pytest.mark.parametrize("kind", ["responses", "websocket"])
async def test_turns_chained_by_response_id(server: LiveServer, kind: str) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        model = MODELS[kind](client)
        agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
        first = await Runner.run(
            agent, "weather in Lima?", run_config=QUIET, auto_previous_response_id=True
        )
        assert "sunny in Lima" in first.final_output
        second = await Runner.run(
            agent, "thanks", previous_response_id=first.last_response_id, run_config=QUIET
        )
        assert second.final_output == "You (user) said: thanks"
        usage = second.raw_responses[0].usage
        assert usage.input_tokens > first.raw_responses[0].usage.input_tokens
        await model.close()

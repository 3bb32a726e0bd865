"""langchain-openai, unmodified: chat and Responses, sync and async, tools, schemas, its errors."""

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.service.conftest import CONTEXT, MODEL, LiveServer

pytestmark = pytest.mark.anyio


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class Place(BaseModel):
    """A place."""

    city: str
    degrees: int


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, server: LiveServer) -> ChatOpenAI:
    return chat(server, use_responses_api=request.param)


def chat(server: LiveServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        stream_usage=True,
        **options,
    )


def test_a_turn(model: ChatOpenAI) -> None:
    answer = model.invoke("hi")
    assert answer.text == "You (user) said: hi"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(answer.text)
    assert "cache_read" in answer.usage_metadata["input_token_details"]


async def test_async_streams(server: LiveServer) -> None:
    for responses in (False, True):  # in one test: its connections belong to one event loop
        model = chat(server, use_responses_api=responses)
        chunks = [chunk async for chunk in model.astream("hi")]
        assert len(chunks) > 2
        assert "".join(chunk.text for chunk in chunks) == "You (user) said: hi"
        whole = sum(chunks[1:], chunks[0])
        assert isinstance(whole, AIMessageChunk)
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["output_tokens"] == len(whole.text)


def test_a_tool_loop(model: ChatOpenAI) -> None:
    bound = model.bind_tools([weather])
    messages: list[Any] = [HumanMessage("weather in Paris and Rome?")]
    asked = bound.invoke(messages)
    assert isinstance(asked, AIMessage)
    assert [call["args"] for call in asked.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    results = [weather.invoke(call) for call in asked.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    told = bound.invoke([*messages, asked, *results])
    assert "sunny in Rome" in told.text


def test_streamed_tool_calls(model: ChatOpenAI) -> None:
    chunks = list(model.bind_tools([weather]).stream("weather in Paris and Rome?"))
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    answer = model.with_structured_output(Place, method=method).invoke("A place as JSON")
    assert answer == Place(city="Paris", degrees=21)


def test_a_response_is_continued_by_its_id(server: LiveServer) -> None:
    model = chat(server, use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("hi")
    assert str(first.response_metadata["id"]).startswith("resp_")
    second = model.invoke([HumanMessage("hi"), first, HumanMessage("and now")])
    assert second.text == "You (user) said: and now"


def test_a_prompt_that_is_too_long_is_known_as_such(model: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        model.invoke("x" * (2 * CONTEXT))

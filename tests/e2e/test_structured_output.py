"""Structured output of the real model over the real SDK: what a grammar forces comes at once."""

import json
from typing import Any

import openai

from tests.e2e.conftest import Server

FORECAST: Any = {
    "type": "object",
    "properties": {
        "temperature_in_degrees_celsius": {"type": "integer", "minimum": -60, "maximum": 60},
        "probability_of_precipitation": {"enum": ["low", "medium", "high"]},
    },
    "required": ["temperature_in_degrees_celsius", "probability_of_precipitation"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "report_the_weather", "strict": True, "parameters": FORECAST},
}
ASKED: Any = {
    "model": "default",
    "messages": [{"role": "user", "content": "What will the weather be in Bergen?"}],
    "seed": 7,
    "n": 2,
    "max_tokens": 80,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def num_forced(server: Server) -> int:
    lines = server.http.get("/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith("headwater_forced_tokens_total ")]
    return int(float(line.split()[1]))


def calls(choices: list[Any]) -> list[str]:
    return [each.message.tool_calls[0].function.arguments for each in choices]


def test_forced_tokens_are_counted_and_streamed_as_any(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        before = num_forced(server)
        whole = sdk.chat.completions.create(**ASKED)
        forced = num_forced(server) - before
        stepwise = sdk.chat.completions.create(**ASKED, logprobs=True)
        assert num_forced(server) == before + forced
        with sdk.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as events:
            num_pieces = sum(event.type == "chunk" for event in events)
            streamed = events.get_final_completion()
    assert calls(whole.choices) == calls(stepwise.choices) == calls(streamed.choices)
    assert len(set(calls(whole.choices))) == 2
    for arguments in calls(whole.choices):
        assert json.loads(arguments).keys() == FORECAST["properties"].keys()
    assert whole.usage is not None and stepwise.usage is not None and streamed.usage is not None
    num_tokens = whole.usage.completion_tokens
    assert num_tokens == stepwise.usage.completion_tokens == streamed.usage.completion_tokens
    assert forced > num_tokens / 3
    assert num_pieces < num_tokens

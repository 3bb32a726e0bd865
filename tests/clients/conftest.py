"""A model that plays agents: what it says follows from what the last message of its prompt was."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.scripted import Script, text_script
from engine.types import EngineRequest, unpack_tokens
from tests.service.conftest import LiveServer, byte_assets, run_server


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def last_message(prompt: str) -> tuple[str, str]:
    """Role and text of the last message that the model reads."""
    *_, last, _ = prompt.split("<|im_start|>")
    role, _, text = last.partition("\n")
    return role, text.removesuffix("\n").removesuffix("<|im_end|>")


def say(prompt: str) -> str:
    """The next move: ask the weather tool about the first city named, then tell what it said."""
    role, text = last_message(prompt)
    if "weather in " in text and "sunny" not in text:
        cities = text.split("weather in ")[1].rstrip("?.").split(" and ")
        return "\n".join(call("weather", city=city) for city in cities)
    if "hand over" in text:
        return call("transfer_to_writer")
    if "sunny" in text:
        return f"I hear: {text.split('response>')[1] if 'response>' in text else text}".strip()
    if "as JSON" in text:
        return '{"city": "Paris", "degrees": 21}'
    return f"You ({role}) said: {text}"


def agent_script(request: EngineRequest) -> Script:
    """What the scripted engine plays for a request."""
    tokens = unpack_tokens(request.token_ids).tolist()
    return text_script(say(byte_assets().vocabulary.join(tokens).decode()), 3)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """One of a module: an engine in a thread that outlived it would be taken for a leak."""
    with run_server(script_for=agent_script) as running:
        yield running


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

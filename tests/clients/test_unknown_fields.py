"""Fields beyond the SDKs' own, as their users send them: `extra_body` is merged into the body."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from websockets.sync.client import connect

from engine.scripted import text_script
from tests.service.conftest import MODEL, LiveServer, run_server

HELLO: Any = [{"role": "user", "content": "hi"}]
EXTRAS = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False,
    "cache_salt": "s", "priority": 0, "return_token_ids": True, "chat_template_kwargs": {},
    "session_id": "s", "rid": "r", "include_reasoning": True, "user_tier": "gold", "top_a": 0,
}  # fmt: skip
NEUTRAL: Any = {
    "user": "u", "metadata": {"a": "b"}, "store": False, "safety_identifier": "s",
    "service_tier": "auto", "reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("fine")) as running:
        yield running


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def refusal(error: openai.BadRequestError) -> tuple[str | None, str | None]:
    return error.code, error.param


def test_what_servers_like_this_one_take_goes_through(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(model=MODEL, messages=HELLO, extra_body=EXTRAS, **NEUTRAL)
    assert chat.choices[0].message.content == "fine"
    response = sdk.responses.create(
        model=MODEL, input="hi", user="u", metadata={"a": "b"}, extra_body={"top_k": 5, "my_own": 1}
    )
    assert response.output_text == "fine"
    completion = sdk.completions.create(model=MODEL, prompt="hi", user="u", extra_body=EXTRAS)
    assert completion.choices[0].text == "fine"


def test_a_slip_is_refused_by_name(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Did you mean 'max_tokens'") as caught:
        sdk.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"max_token": 5})
    assert refusal(caught.value) == ("unknown_parameter", "max_token")
    with pytest.raises(openai.BadRequestError, match="Did you mean 'max_tokens'"):
        sdk.completions.create(model=MODEL, prompt="hi", extra_body={"maxTokens": 5})
    with pytest.raises(openai.BadRequestError, match="Did you mean 'max_output_tokens'") as caught:
        sdk.responses.create(model=MODEL, input="hi", extra_body={"max_tokens": 5})
    assert refusal(caught.value) == ("unknown_parameter", "max_tokens")


def test_anthropic(server: LiveServer) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        extras = {"top_k": 5, "context_management": {}, "betas": [], "my_own": 1}
        message = sdk.messages.create(**asked, metadata={"user_id": "u"}, extra_body=extras)
        assert message.stop_reason == "end_turn"
        for call in (sdk.messages.create, sdk.messages.count_tokens):
            fields = asked if call == sdk.messages.create else {"model": MODEL, "messages": HELLO}
            with pytest.raises(anthropic.BadRequestError, match="Did you mean 'stop_sequences'"):
                call(**fields, extra_body={"stop": ["x"]})


def test_langchain(server: LiveServer) -> None:
    def model(extra: dict[str, Any]) -> ChatOpenAI:
        url, key = f"{server.url}/v1", SecretStr("none")
        return ChatOpenAI(model=MODEL, base_url=url, api_key=key, max_retries=0, extra_body=extra)

    assert model({"top_k": 5, "my_own": 1}).invoke("hi").content == "fine"
    with pytest.raises(openai.BadRequestError, match="Did you mean 'temperature'"):
        model({"temprature": 0.5}).invoke("hi")


def test_on_a_socket_it_is_an_error_event(server: LiveServer) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses", proxy=None) as socket:
        create = {"type": "response.create", "model": MODEL, "input": "hi"}
        socket.send(json.dumps({**create, "max_tokens": 5, "stream_id": "a"}))
        error = json.loads(socket.recv(timeout=20))
        assert (error["status"], error["stream_id"]) == (400, "a")
        assert error["error"]["code"] == "unknown_parameter"
        socket.send(json.dumps({**create, "my_own": 5, "stream_id": "a"}))
        while (event := json.loads(socket.recv(timeout=20)))["type"] != "response.completed":
            assert event["type"] != "error"


@pytest.mark.parametrize("path", ["", "/", "/v1/v1"])
def test_a_wrong_base_url_is_told_the_right_one(server: LiveServer, path: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}{path}", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError, match=r"/v1") as caught:
            sdk.chat.completions.create(model=MODEL, messages=HELLO)
        assert caught.value.code == "unknown_url"
        assert "base URL" in caught.value.message
    with (
        anthropic.Anthropic(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as claude,
        pytest.raises(anthropic.NotFoundError, match="leave it out of its base URL"),
    ):
        claude.messages.create(model=MODEL, max_tokens=9, messages=HELLO)

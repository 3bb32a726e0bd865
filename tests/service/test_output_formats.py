"""What an answer must match, over HTTP: what reaches the engine, and what is refused where."""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest

from engine.scripted import Script
from engine.scripted.script import text_script
from engine.types import EngineRequest
from tests.service.calls import ask, body
from tests.service.conftest import MODEL, LiveServer, run_server

BAD = {"type": "object", "properties": {"a": {"type": "strin"}}}
GOOD = {"type": "object", "properties": {"a": {"type": "string"}}}
Seen: TypeAlias = list[EngineRequest]


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[LiveServer, Seen]]:
    """A server, and the requests its engine was given."""
    seen: Seen = []

    def script_for(request: EngineRequest) -> Script:
        seen.append(request)
        return text_script('{"a": "b"}')

    with run_server(script_for=script_for) as server:
        yield server, seen


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize(
    ("fields", "inside"),
    [
        ({"response_format": {"type": "json_object"}}, '"type": "object"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": GOOD}}},
            '"properties"',
        ),
        ({"structured_outputs": {"json": json.dumps(GOOD)}}, '"properties"'),
        ({"structured_outputs": {"regex": "[a-z]/+"}}, r"[a-z]\\/+"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, r"start: \"x\""),
        ({"tools": [tool(GOOD)], "tool_choice": "required"}, "<tool_call>"),
        ({"response_format": {"type": "text"}}, ""),
        ({"tools": [tool(BAD)]}, ""),
    ],
)
def test_the_engine_gets_the_grammar(
    played: tuple[LiveServer, Seen], fields: dict[str, Any], inside: str
) -> None:
    server, seen = played
    ask(server, **fields)
    assert inside in seen[-1].grammar
    assert bool(inside) == bool(seen[-1].grammar)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format.json_schema.schema.properties.a",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (
            {"tools": [tool(GOOD), tool(BAD)], "tool_choice": "required"},
            "tools[1].function.parameters.properties.a",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool(GOOD)], "tool_choice": "maybe"}, "tool_choice"),
        (
            {
                "tools": [tool(GOOD)],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice.function.name",
        ),
    ],
)
def test_what_is_wrong_is_refused_at_its_place(
    played: tuple[LiveServer, Seen], fields: dict[str, Any], param: str
) -> None:
    server, _ = played
    answer = server.http.post("/v1/chat/completions", json=body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    ask(server)


def test_responses_name_their_own_fields(played: tuple[LiveServer, Seen]) -> None:
    server, _ = played
    flat = {"type": "function", "name": "f", "parameters": BAD}
    for fields, param in (
        ({"tools": [flat], "tool_choice": "required"}, "tools[0].parameters.properties.a"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}},
            "text.format.schema.properties.a",
        ),
    ):
        sent = {"model": MODEL, "input": "hi", **fields}
        answer = server.http.post("/v1/responses", json=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert f"'{param}'" in error["message"]


def test_messages_name_their_own_fields(played: tuple[LiveServer, Seen]) -> None:
    server, _ = played
    for fields, path in (
        (
            {
                "tools": [
                    {"name": "g", "input_schema": GOOD},
                    {"name": "f", "input_schema": BAD},
                ],
                "tool_choice": {"type": "any"},
            },
            "tools[1].input_schema.properties.a",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format.schema.properties.a",
        ),
    ):
        hello = [{"role": "user", "content": "hi"}]
        sent = {"model": MODEL, "max_tokens": 9, "messages": hello, **fields}
        answer = server.http.post("/v1/messages", json=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert f"'{path}'" in error["message"]

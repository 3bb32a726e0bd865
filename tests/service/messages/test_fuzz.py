"""Bodies that nobody meant: whatever they are, the answer is never the server's fault."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.scripted import text_script
from service.dialects.messages_decode import MessagesBody
from tests.service.conftest import MODEL, LiveServer, run_server
from tests.service.messages.calls import COUNT, HELLO, MESSAGES, body

KINDS = ["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", MODEL, "auto", "ephemeral", 0, 1, -1, 2**63, *KINDS])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = st.sampled_from(msgspec.structs.fields(MessagesBody)).map(lambda each: each.encode_name)
IDS = st.sampled_from(["a", "b"])
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "text": st.text(max_size=20),
        "id": IDS,
        "tool_use_id": IDS,
        "name": st.text(max_size=5),
        "input": st.dictionaries(st.text(max_size=5), JSON, max_size=2) | JSON,
        "content": st.text(max_size=9) | JSON,
        "cache_control": st.just({"type": "ephemeral"}) | JSON,
    },
)
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=20) | st.lists(BLOCKS, max_size=3) | JSON,
    }
)
TOOLS = st.fixed_dictionaries(
    {"name": st.text(max_size=5)},
    optional={"input_schema": JSON, "description": JSON, "type": JSON, "cache_control": JSON},
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("ok")) as running:
        yield running


def check(server: LiveServer, sent: Any) -> None:
    for path in (MESSAGES, COUNT):
        answer = server.http.post(path, content=msgspec.json.encode(sent))
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]


FUZZ = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(fields=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
def test_any_value_in_any_field(server: LiveServer, fields: dict[str, Any]) -> None:
    check(server, body(**fields))


@FUZZ
@given(
    turns=st.lists(TURNS, min_size=1, max_size=4),
    tools=st.lists(TOOLS, max_size=2),
    system=st.text(max_size=9) | st.lists(BLOCKS, max_size=2) | JSON,
)
def test_any_turns(server: LiveServer, turns: list[Any], tools: list[Any], system: Any) -> None:
    check(server, body(messages=[HELLO, *turns], tools=tools, system=system))


@FUZZ
@given(raw=JSON)
def test_any_json(server: LiveServer, raw: Any) -> None:
    answer = server.http.post(MESSAGES, content=msgspec.json.encode(raw))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"

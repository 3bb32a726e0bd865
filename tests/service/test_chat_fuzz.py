"""Bodies that nobody meant: whatever they are, the answer is never the server's fault."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.scripted import text_script
from service.dialects.chat_decode import ChatBody
from tests.service.calls import CHAT, body
from tests.service.conftest import MODEL, LiveServer, run_server

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", "text", "function", MODEL, "auto", 0, 1, -1, 2**63])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = st.sampled_from(msgspec.structs.fields(ChatBody)).map(lambda field: field.encode_name)
PARTS = st.fixed_dictionaries({}, optional={"type": JSON, "text": JSON, "refusal": JSON})
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional={
        "content": st.text(max_size=20) | st.lists(PARTS, max_size=3) | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"id": st.text(max_size=5), "function": JSON}), max_size=2
        ),
        "tool_call_id": JSON,
        "name": JSON,
    },
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("ok")) as running:
        yield running


def check(server: LiveServer, sent: dict[str, Any]) -> None:
    answer = server.http.post(CHAT, content=msgspec.json.encode(sent))
    assert answer.status_code in (200, 400, 404, 408), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


FUZZ = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(fields=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
def test_any_value_in_any_field(server: LiveServer, fields: dict[str, Any]) -> None:
    check(server, body(**fields))


@FUZZ
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4), continued=st.booleans())
def test_any_messages(server: LiveServer, messages: list[Any], continued: bool) -> None:
    check(server, body(messages=messages, continue_final_message=continued))


@FUZZ
@given(raw=st.binary(max_size=60) | JSON.map(msgspec.json.encode))
def test_any_bytes(server: LiveServer, raw: bytes) -> None:
    answer = server.http.post(CHAT, content=raw)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["type"] == "invalid_request_error"

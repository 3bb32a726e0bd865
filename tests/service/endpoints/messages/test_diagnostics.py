"""`diagnostics.previous_message_id`: where a prompt leaves an earlier one, by the SDK's types."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from engine.scripted import text_script
from service.cache.diagnosis import Fingerprints, fingerprint
from tests.service.conftest import MODEL, LiveServer, run_server
from tests.service.endpoints.messages.calls import HELLO, WEATHER

MORE = [HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("ok")) as running:
        yield running


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(sdk: anthropic.Anthropic, previous: str | None, **fields: Any) -> Message:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [HELLO], "system": "Be kind."}
    diagnostics: Any = {"previous_message_id": previous}
    message = sdk.messages.create(**{**asked, **fields}, diagnostics=diagnostics)
    assert isinstance(message, Message)
    return message


def reason_of(message: Message) -> tuple[str, int] | None:
    diagnostics = message.diagnostics
    if diagnostics is None or diagnostics.cache_miss_reason is None:
        return None
    reason = diagnostics.cache_miss_reason
    return reason.type, getattr(reason, "cache_missed_input_tokens", 0)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"messages": MORE}, None),
        ({"messages": [{"role": "user", "content": "other"}]}, "messages_changed"),
        ({"system": "Be brief."}, "system_changed"),
        ({"tools": [WEATHER]}, "tools_changed"),
    ],
)
def test_the_part_that_differs_is_named(
    sdk: anthropic.Anthropic, changed: dict[str, Any], expected: str | None
) -> None:
    first = ask(sdk, None)
    assert reason_of(first) is None
    reason = reason_of(ask(sdk, first.id, **changed))
    assert (reason and reason[0]) == expected
    assert reason is None or reason[1] > 0


def test_a_stream_says_the_same(sdk: anthropic.Anthropic) -> None:
    first = ask(sdk, None)
    diagnostics: Any = {"previous_message_id": first.id}
    with sdk.messages.stream(
        model=MODEL,
        max_tokens=9,
        messages=[{"role": "user", "content": "other"}],
        system="Be kind.",
        diagnostics=diagnostics,
    ) as stream:
        message = stream.get_final_message()
    reason = reason_of(message)
    assert reason is not None and reason[0] == "messages_changed"


def test_what_is_not_known_is_said(sdk: anthropic.Anthropic, server: LiveServer) -> None:
    assert reason_of(ask(sdk, "msg_none")) == ("previous_message_not_found", 0)
    plain = sdk.messages.create(
        model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    )
    assert plain.diagnostics is None
    assert reason_of(ask(sdk, plain.id)) == ("previous_message_not_found", 0)


def test_fingerprints_are_bounded_and_each_tenants_own() -> None:
    kept = Fingerprints(max_bytes=3000)
    for number in range(9):
        kept.add("one", f"msg_{number}", fingerprint(bytes(400), "", (), ""))
    assert [number for number in range(9) if kept.get("one", f"msg_{number}")] == [6, 7, 8]
    assert kept.get("two", "msg_8") is None

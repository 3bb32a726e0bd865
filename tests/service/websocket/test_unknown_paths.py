"""A WebSocket where there is none: what HTTP says there, and a line in the log."""

import json
import logging
from collections.abc import Iterator

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from engine.scripted import text_script
from tests.service.conftest import LiveServer, run_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("x")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/responses", "the base URL ends in /v1"),
        ("/v1/v1/responses", "leave it out of its base URL"),
        ("/v1/realtime", "WebSockets are at /v1/responses"),
        ("/v1/chat/completions", "WebSockets are at /v1/responses"),
        ("/", "WebSockets are at /v1/responses"),
    ],
)
def test_it_is_a_404_with_a_sentence(
    server: LiveServer, caplog: pytest.LogCaptureFixture, path: str, said: str
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None).close()
    response = refused.value.response
    assert response.status_code == 404
    error = json.loads(response.body)["error"]
    assert error["code"] == "unknown_url"
    assert said in error["message"]
    assert any(f"WebSocket {path}" in record.getMessage() for record in caplog.records)

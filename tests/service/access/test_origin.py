"""Host and Origin: what a rebinding or foreign web page cannot do."""

import socket
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from engine.scripted import text_script
from service.config import Settings
from tests.service.conftest import LiveServer, run_server

APP = "https://app.example"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("x")) as running:
        yield running


@pytest.fixture(scope="module")
def open_server() -> Iterator[LiveServer]:
    settings = replace(Settings(), allowed_hosts=("Gpu.Example",), allowed_origins=(APP,))
    with run_server(text_script("x"), settings=settings) as running:
        yield running


def get(server: LiveServer, **headers: str) -> httpx.Response:
    return server.http.get("/v1/models", headers=headers)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9", "127.0.0.1:8000", "[::1]:80", "192.168.1.9", "a.localhost"]
)
def test_loopback_names_and_addresses_are_hosts(server: LiveServer, host: str) -> None:
    assert get(server, host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.x", "[", "@"]
)
def test_other_hosts_are_refused(server: LiveServer, host: str) -> None:
    answer = get(server, host=host)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(("version", "status"), [("1.1", b"400"), ("1.0", b"200")])
def test_a_host_is_missing_only_in_old_requests(
    server: LiveServer, version: str, status: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f"GET /v1/models HTTP/{version}\r\nconnection: close\r\n\r\n".encode())
        assert sock.recv(1 << 16).split(b" ")[1] == status


def test_a_host_can_be_allowed(open_server: LiveServer) -> None:
    assert get(open_server, host="gpu.example:8000").status_code == 200
    assert get(open_server, host="other.example").status_code == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:3000", "http://[", ""]
)
def test_foreign_origins_are_refused(server: LiveServer, origin: str) -> None:
    answer = get(server, origin=origin)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"


def test_the_servers_own_pages_may_call_it(server: LiveServer) -> None:
    host = f"127.0.0.1:{server.port}"
    assert get(server, origin=f"http://{host}", host=host).status_code == 200


def test_an_origin_can_be_allowed_and_is_told_so(open_server: LiveServer) -> None:
    answer = get(open_server, origin=APP)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    asking = {"origin": APP, "access-control-request-method": "POST"}
    preflight = open_server.http.options("/v1/chat/completions", headers=asking)
    assert preflight.status_code == 200
    assert get(open_server, origin="http://evil.example").status_code == 403


@pytest.mark.parametrize(
    ("host", "origin"), [("evil.example", None), ("localhost", "http://evil.example")]
)
def test_websocket_handshakes_are_checked_too(
    server: LiveServer,
    host: str,
    origin: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port))
    uri = f"ws://{host}:{server.port}/v1/responses"
    with (
        sock,
        pytest.raises(InvalidStatus) as refused,
        connect(uri, sock=sock, origin=None if origin is None else Origin(origin)),
    ):
        pass
    assert refused.value.response.status_code == 403
    assert b"not_allowed" in refused.value.response.body
    assert "handshake" not in caplog.text  # a refusal is nothing to log as an error

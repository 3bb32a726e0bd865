"""Keys over real sockets: every dialect and the WebSocket, tenants apart, the operator's routes."""

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from engine.scripted import text_script
from service.access.keys import KeyFile, hash_key, key_entry
from tests.service.conftest import MODEL, LiveServer, run_server

A, B, OPERATOR = "key-of-a", "key-of-b", "key-of-operator"
LIMITS = "[tenants.b]\nrequests_per_minute = 1\n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    path = tmp_path / "keys.toml"
    entries = [(A, "a", False), (B, "b", False), (OPERATOR, "operators", True)]
    path.write_text("".join(key_entry(hash_key(k), t, admin) for k, t, admin in entries) + LIMITS)
    with run_server(text_script("x"), keys=KeyFile(path)) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["", "wrong", hash_key(A)])
def test_without_a_good_key_nothing_is_served(server: LiveServer, key: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0) as client:
        if not key:
            answer = server.http.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
    assert refused.value.code == "invalid_api_key"
    with (
        anthropic.Anthropic(base_url=server.url, api_key=key or "none", max_retries=0) as claude,
        pytest.raises(anthropic.AuthenticationError),
    ):
        claude.messages.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "hi"}]
        )
    assert server.records == []


def test_a_web_page_offers_its_key_as_a_subprotocol(server: LiveServer) -> None:
    """Browsers cannot send headers with a handshake, and need one of their protocols accepted."""
    uri = f"ws://127.0.0.1:{server.port}/v1/responses"
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(uri, proxy=None, subprotocols=_offer("wrong")),
    ):
        pass
    assert refused.value.response.status_code == 401
    with connect(uri, proxy=None, subprotocols=_offer(A)) as socket:
        assert socket.subprotocol == "responses", "the key is not said back"
        socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}))
        while json.loads(socket.recv())["type"] != "response.completed":
            pass
    assert [record.tenant for record in server.ended()] == ["a"]


def _offer(key: str) -> list[Subprotocol]:
    return [Subprotocol(f"openai-insecure-api-key.{key}"), Subprotocol("responses")]


def test_both_headers_carry_a_key(server: LiveServer) -> None:
    for headers in (bearer(A), {"x-api-key": A}, {"authorization": f"bearer  {A}"}):
        assert server.http.post("/v1/chat/completions", json=CHAT, headers=headers).is_success
    assert {record.tenant for record in server.ended(3)} == {"a"}


def test_sockets_need_a_key_and_have_a_tenant(server: LiveServer) -> None:
    uri = f"ws://127.0.0.1:{server.port}/v1/responses"
    with pytest.raises(InvalidStatus) as refused, connect(uri, proxy=None):
        pass
    assert refused.value.response.status_code == 401
    with connect(uri, proxy=None, additional_headers=bearer(A)) as socket:
        socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}))
        while (frame := json.loads(socket.recv()))["type"] != "response.completed":
            assert frame["type"] != "error", frame
    (record,) = server.ended()
    assert record.tenant == "a"

    # What one tenant stored, no other can see, continue or delete.
    path = f"/v1/responses/{frame['response']['id']}"
    assert server.http.get(path, headers=bearer(A)).is_success
    assert server.http.get(path, headers=bearer(OPERATOR)).status_code == 404
    assert server.http.delete(path, headers=bearer(OPERATOR)).status_code == 404
    body = {"model": MODEL, "input": "more", "previous_response_id": frame["response"]["id"]}
    stolen = server.http.post("/v1/responses", json=body, headers=bearer(OPERATOR))
    assert stolen.json()["error"]["code"] == "previous_response_not_found"
    assert server.http.post("/v1/responses", json=body, headers=bearer(A)).is_success


def test_the_operators_routes(server: LiveServer) -> None:
    def get(path: str, **headers: str) -> httpx.Response:
        return server.http.get(path, headers=headers)

    assert get("/health").is_success
    assert get("/health/ready").is_success
    assert get("/v1/roofline", **bearer(A)).status_code == 403
    assert get("/v1/roofline", **bearer(OPERATOR)).is_success
    assert get("/admin/pool").status_code == 401
    assert get("/admin/pool", **bearer(A)).json()["error"]["code"] == "admin_only"
    assert get("/admin/pool", **bearer(OPERATOR)).is_success
    assert get("/administrator", **bearer(A)).status_code == 404


def test_a_tenant_over_its_limit_waits_and_the_others_do_not(server: LiveServer) -> None:
    def post(key: str) -> httpx.Response:
        return server.http.post("/v1/chat/completions", json=CHAT, headers=bearer(key))

    assert post(B).is_success
    refused = post(B)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
    assert post(A).is_success

"""Models, health, tokens, the pool, and URLs that do not exist."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.scripted import Script, ScriptStep, text_script
from service.app import App, create_app
from service.config import Settings
from service.services import Services
from tests.service.calls import ask, body
from tests.service.conftest import CONTEXT, INFO, MODEL, VOCAB, LiveServer, run_server
from tests.service.raw import chat_request, connected, read_until


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("x")) as running:
        yield running


def test_models_read_by_openai_and_anthropic_clients(server: LiveServer) -> None:
    listed = server.http.get("/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list" and listed["has_more"] is False
    assert listed["first_id"] == listed["last_id"] == model["id"] == MODEL
    assert (model["object"], model["type"]) == ("model", "model")
    assert model["max_model_len"] == CONTEXT
    assert server.http.get(f"/v1/models/{MODEL}").json() == model
    missing = server.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_served_names_and_aliases() -> None:
    settings = replace(Settings(), model_names=("org/model", "short"))
    with run_server(text_script("x"), settings=settings) as server:
        ids = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
        assert ids == ["org/model", "short"]
        assert server.http.get("/v1/models/org%2Fmodel").json()["id"] == "org/model"
        for name in ("org/model", "short", "default"):
            assert ask(server, model=name)["model"] == "org/model"
        refused = server.http.post("/v1/chat/completions", json=body(model=MODEL))
        assert refused.status_code == 404
        message = refused.json()["error"]["message"]
        assert "this server serves 'org/model', also as 'short', 'default'" in message


def test_health(server: LiveServer) -> None:
    alive = server.http.get("/health")
    assert alive.status_code == 200
    assert alive.json()["state"] == "running"
    ready = server.http.get("/health/ready")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    assert ready.json()["engine"]["model_digest"] == INFO.model_digest
    assert not any("peak" in name for name in ready.json()["engine"]), "/v1/roofline has them"


def test_a_dead_engine_is_told() -> None:
    with run_server(Script((ScriptStep(crash="the loop broke"),))) as server:
        answer = server.http.post("/v1/chat/completions", json=body())
        assert answer.status_code in (500, 503)
        while server.engine.alive:
            pass
        health = server.http.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, "ended")
        assert server.http.get("/health/ready").json()["ready"] is False
        assert server.http.get("/health/ready").json()["reason"]
        again = server.http.post("/v1/chat/completions", json=body())
        assert again.status_code == 503
        assert again.json()["error"]["code"] == "server_is_overloaded"
        assert again.headers["retry-after-ms"]
        assert server.http.get("/admin/pool").status_code == 503


def test_tokenize_and_detokenize_invert_each_other(server: LiveServer) -> None:
    text = "naïve 😸<|im_end|>"
    answer = server.http.post("/tokenize", json={"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == CONTEXT
    back = server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokenize_renders_messages_as_chat_does(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = server.http.post("/tokenize", json={"messages": messages}).json()
    assert answer["count"] == ask(server, messages=messages)["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x" * (2**20 + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [0, 2**70]}, "tokens"),
    ],
)
def test_bad_token_calls_are_named(
    server: LiveServer, path: str, fields: dict[str, object], param: str
) -> None:
    answer = server.http.post(path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_pool_counts_pages_and_requests() -> None:
    with run_server(Script(finish=None)) as server:
        idle = server.pool()
        assert idle["free"] == idle["total"]
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=True)))
            read_until(sock, b"data: ")
            while not (busy := server.pool())["running"]:
                pass
            assert busy["referenced"] > 0
            states = ("free", "cached", "referenced", "pinned")
            assert sum(busy[state] for state in states) == busy["total"]
        assert server.wait_for_idle()["referenced"] == 0


def test_flush_says_how_much_it_dropped(server: LiveServer) -> None:
    answer = server.http.post("/admin/cache/flush")
    assert answer.json() == {"flushed_pages": 0}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completion", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/responses", 426, "upgrade_required"),
        ("GET", "/admin/feed", 426, "upgrade_required"),
    ],
)
def test_urls_and_methods_that_are_not(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/dashboard/"])
def test_a_newcomer_is_led_to_the_dashboard_and_told_what_there_is(
    server: LiveServer, path: str
) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 307
    assert answer.json()["models"] == "/v1/models"
    page = server.http.get(path, follow_redirects=True)
    assert (page.url.path, page.status_code) == ("/dashboard", 200)
    assert server.http.head(path).status_code == 307


def test_request_ids_are_echoed_if_sane_and_made_if_not(server: LiveServer) -> None:
    def id_of(**headers: str) -> str:
        return server.http.get("/nope", headers=headers).headers["x-request-id"]

    assert id_of(**{"x-request-id": "abc-1:2"}) == "abc-1:2"
    assert id_of().startswith("req_")
    assert id_of() != id_of()
    assert id_of(**{"x-request-id": "x" * 1000}).startswith("req_")
    assert id_of(**{"x-request-id": "<b>"}).startswith("req_")


def test_what_breaks_inside_is_a_500_that_names_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken_app(services: Services) -> App:
        class Broken:
            names = property(lambda self: 1 / 0)

        return create_app(replace(services, card=Broken()))  # type: ignore[arg-type]

    with run_server(text_script("x"), app_for=broken_app) as server:
        answer = server.http.get("/v1/models", headers={"x-request-id": "find-me"})
        assert server.http.get("/health").status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "find-me" in answer.json()["error"]["message"]
    assert any("find-me" in record.getMessage() and record.exc_info for record in caplog.records)


def test_more_than_the_engine_takes_is_refused_and_told_when_to_retry() -> None:
    with run_server(Script(finish=None), max_open=1) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=True)))
            read_until(sock, b"data: ")
            refused = server.http.post("/v1/chat/completions", json=body())
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "server_is_overloaded")
            assert int(refused.headers["retry-after-ms"]) > 0
        assert [record.error_type for record in server.ended(2)] == ["server_is_overloaded", None]

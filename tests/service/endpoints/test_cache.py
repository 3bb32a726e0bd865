"""The cache by hand, with an engine that has none: every call is answered."""

from typing import Any

from engine.scripted import text_script
from tests.service.conftest import LiveServer, run_server


def test_an_engine_without_a_cache_says_so() -> None:
    with run_server(text_script("abc")) as server:
        assert _post(server, "explain")["cache"]["reason"] == "cold"
        assert _post(server, "prewarm")["lease"] is None
        assert _post(server, "leases", 501)["error"]["code"] == "no_cache"
        assert server.http.get("/v1/cache/leases").json()["data"] == []
        assert server.http.delete("/v1/cache/leases/x").status_code == 404


def _post(server: LiveServer, path: str, status: int = 200) -> dict[str, Any]:
    answer = server.http.post(f"/v1/cache/{path}", json={"prompt": "hello"})
    assert answer.status_code == status, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_slips_are_refused_and_a_whole_chat_body_is_taken() -> None:
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "default",
        "temperature": 0,
        "max_tokens": 9,
        "stream": True,
    }
    with run_server(text_script("abc")) as server:
        for path in ("/v1/cache/explain", "/v1/cache/prewarm", "/tokenize"):
            assert server.http.post(path, json=chat).status_code == 200, path
            for slip, where in (
                ({"system": "Be kind."}, "system"),
                ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents"),
            ):
                error = server.http.post(path, json={**chat, **slip}).json()["error"]
                assert (error["code"], error["param"]) == ("unknown_parameter", where), path
        answer = server.http.post("/v1/cache/leases/x", json={"ttl_seconds": 9})
        assert answer.json()["error"]["param"] == "ttl_seconds"

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

"""The page's files and its feed over real sockets: who may see what, and what it costs."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.scripted import text_script
from engine.views import EngineView
from service.access.keys import KeyFile, hash_key, key_entry
from service.dashboard.feed import MAX_WATCHERS
from tests.service.conftest import MODEL, LiveServer, run_server

TENANT, OPERATOR = "key-of-a", "key-of-operator"
SECRET = "the treasure lies under the mill"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}
Message = dict[str, Any]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with run_server(text_script("a long answer")) as running:
        yield running


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[LiveServer]:
    path = tmp_path / "keys.toml"
    entries = [(TENANT, "a", False), (OPERATOR, "operators", True)]
    path.write_text("".join(key_entry(hash_key(key), t, admin) for key, t, admin in entries))
    with run_server(text_script("x"), keys=KeyFile(path)) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextlib.contextmanager
def watching(server: LiveServer, key: str = "") -> Iterator[Iterator[Message]]:
    """The messages of one watcher."""
    headers = bearer(key) if key else {}
    with server.http.stream("GET", "/admin/feed", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def test_the_page_is_served_with_a_strict_policy(server: LiveServer) -> None:
    page = server.http.get("/dashboard").raise_for_status()
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in page.text.replace("http://www.w3.org/", "")
    assert "https://" not in page.text
    assert server.http.get("/dashboard/app.js").headers["content-type"].startswith("text/javascr")
    for name in ("page.py", "..%2Fpage.py", "nothing"):
        assert server.http.get(f"/dashboard/{name}").status_code == 404


def test_a_request_is_a_lane_with_its_phases_and_tokens(server: LiveServer) -> None:
    with watching(server) as messages:
        hello = next(messages)
        assert hello["type"] == "hello" and hello["model"] == MODEL
        server.http.post("/v1/chat/completions", json=CHAT).raise_for_status()
        lanes: dict[str, Message] = {}
        tokens: list[float] = []
        while not lanes or any(lane["end"] is None for lane in lanes.values()):
            for lane in next(messages).get("lanes", ()):
                lanes[lane["id"]] = lane
                tokens += lane["tokens"]
    (lane,) = lanes.values()
    assert lane["status"] == "stop"
    assert lane["begin"] <= tokens[0] <= tokens[-1] <= lane["end"]
    assert [phase[0] for phase in lane["phases"]][:2] == ["receive", "tokenize"]
    record = server.records[0]
    assert len(tokens) == len(record.token_ns)
    with watching(server) as messages:
        assert next(messages)["lanes"] == [{**lane, "tokens": tokens}], "who comes later sees it"


def test_nothing_that_was_said_is_in_the_feed(server: LiveServer) -> None:
    with watching(server) as messages:
        next(messages)
        server.http.post("/v1/chat/completions", json=CHAT).raise_for_status()
        heard = ""
        while '"stop"' not in heard:
            heard += json.dumps(next(messages))
    assert "treasure" not in heard and "long answer" not in heard


def test_the_engine_is_looked_at_only_while_somebody_watches(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look serves all watchers."""
    looks: list[bool] = []
    look = type(server.engine).view

    async def counted(self: Any, *, tree: bool) -> EngineView:
        looks.append(tree)
        view: EngineView = await look(self, tree=tree)
        return view

    monkeypatch.setattr(type(server.engine), "view", counted)
    server.http.get("/dashboard").raise_for_status()
    server.http.post("/v1/chat/completions", json=CHAT).raise_for_status()
    assert looks == []
    with watching(server) as one, watching(server) as other:
        next(one), next(other)
        while "stats" not in next(one):
            pass
        assert 1 <= len(looks) <= 3
    server.wait_for_idle()
    feed = server.server._app._draining[-1]
    while feed._watchers or not feed._task.done():  # type: ignore[attr-defined]
        server.http.get("/health")


def test_watchers_are_bounded(server: LiveServer) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(
            httpx.Client(
                base_url=server.url,
                trust_env=False,
                limits=httpx.Limits(max_connections=MAX_WATCHERS + 1),
            )
        )
        held: list[Iterator[str]] = []  # an iterator that is dropped ends its stream
        for _ in range(MAX_WATCHERS):
            answer = stack.enter_context(client.stream("GET", "/admin/feed"))
            held.append(answer.iter_lines())
            assert next(held[-1]).startswith("data: ")
        refused = client.get("/admin/feed")
        assert refused.status_code == 503 and "retry-after" in refused.headers


def test_a_draining_server_lets_its_watchers_go(server: LiveServer) -> None:
    with watching(server) as messages:
        next(messages)
        server.stop()
        assert [*messages][-1:] != [None], "the stream ends by itself"


def test_with_keys_the_page_is_open_and_what_it_shows_is_the_operators(guarded: LiveServer) -> None:
    assert guarded.http.get("/dashboard").is_success
    assert guarded.http.get("/dashboard/app.js").is_success
    for path in ("/admin/feed", "/admin/tree/0"):
        assert guarded.http.get(path).status_code == 401
        assert guarded.http.get(path, headers=bearer(TENANT)).status_code == 403
    with watching(guarded, OPERATOR) as messages:
        assert next(messages)["type"] == "hello"
    assert guarded.http.get("/admin/tree/0", headers=bearer(OPERATOR)).status_code == 404

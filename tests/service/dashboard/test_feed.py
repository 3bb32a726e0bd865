"""The page's files and its feed over real sockets: who may see what, and what it costs."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.typing import Subprotocol

from engine.scripted import text_script
from engine.views import EngineView
from service.access.credentials import KEY_PROTOCOL
from service.access.keys import KeyFile, hash_key, key_entry
from service.dashboard.feed import MAX_WATCHERS
from service.transport.handshake import SERVICE_RESTART
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


def connected(server: LiveServer, key: str = "") -> Connection:
    """A watcher, which shows its key as a browser has to."""
    names = ["headwater.feed", *([f"{KEY_PROTOCOL}{key}"] if key else [])]
    url = f"ws://127.0.0.1:{server.port}/admin/feed"
    return connect(url, subprotocols=[Subprotocol(name) for name in names], proxy=None)


@contextlib.contextmanager
def watching(server: LiveServer, key: str = "") -> Iterator[Iterator[Message]]:
    """The messages of one watcher."""
    with connected(server, key) as socket:
        assert socket.subprotocol == "headwater.feed"
        yield (json.loads(frame) for frame in socket)


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
        for _ in range(MAX_WATCHERS):
            assert json.loads(stack.enter_context(connected(server)).recv())["type"] == "hello"
        with pytest.raises(InvalidStatus) as refused:
            connected(server)
        answer = refused.value.response
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert b"watched by 32 already" in (answer.body or b"")


def test_what_a_watcher_says_is_not_heard(server: LiveServer) -> None:
    with connected(server) as socket:
        for number in range(500):
            socket.send(f"{number}" * 1000)
        assert json.loads(socket.recv())["type"] == "hello"
        server.http.post("/v1/chat/completions", json=CHAT).raise_for_status()
        while "lanes" not in json.loads(socket.recv()):
            pass


def test_a_draining_server_lets_its_watchers_go(server: LiveServer) -> None:
    with watching(server) as messages:
        next(messages)
        server.stop()
        with pytest.raises(ConnectionClosedError) as ended:
            while True:
                next(messages)
        assert ended.value.rcvd is not None and ended.value.rcvd.code == SERVICE_RESTART


def test_with_keys_the_page_is_open_and_what_it_shows_is_the_operators(guarded: LiveServer) -> None:
    assert guarded.http.get("/dashboard").is_success
    assert guarded.http.get("/", follow_redirects=True).is_success
    assert guarded.http.get("/dashboard/app.js").is_success
    for key, status in (("", 401), (TENANT, 403)):
        headers = bearer(key) if key else {}
        assert guarded.http.get("/admin/tree/0", headers=headers).status_code == status
        with pytest.raises(InvalidStatus) as refused:
            connected(guarded, key)
        assert refused.value.response.status_code == status
    with watching(guarded, OPERATOR) as messages:
        assert next(messages)["type"] == "hello"
    assert guarded.http.get("/admin/tree/0", headers=bearer(OPERATOR)).status_code == 404

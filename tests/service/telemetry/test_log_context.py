"""Whose trace a line tells: that of the request it belongs to, and never a stranger's."""

import asyncio
import gc
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.sync.client import connect

from engine.scripted import Script, ScriptedCore, ScriptStep, in_order, text_script
from engine.transport import start_thread_engine
from service.access import keys as keys_module
from service.access.keys import KeyFile, hash_key, key_entry
from service.config import Settings
from service.dashboard.feed import Feed
from service.prewarm import read_prewarm, warm_lines
from service.responses.store import ResponsesStore
from service.services import build_services
from service.telemetry.log_context import TRACE_ID, TraceFilter
from tests.service.calls import CHAT, body
from tests.service.conftest import INFO, byte_assets, run_server
from tests.service.raw import chat_request, connected, read_until
from tests.service.websocket.live import create, receive, serving

FIRST, SECOND = "a" * 32, "b" * 32
SILENT = Script(finish=None)


def traceparent(trace_id: str) -> str:
    return f"00-{trace_id}-b7ad6b7169203331-01"


def with_trace(request: bytes, trace_id: str) -> bytes:
    """The same HTTP request, in a trace."""
    head, _, rest = request.partition(b"\r\n")
    return b"\r\n".join((head, b"traceparent: " + traceparent(trace_id).encode(), rest))


class Lines(logging.Handler):
    """Every line as it would be written, and a bell for each."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(TraceFilter())
        self.told: list[str] = []
        self._bell = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._bell:
            self.told.append(record.getMessage())
            self._bell.notify_all()

    def wait_for(self, text: str) -> str:
        """The first line with the text."""
        found: list[str] = []

        def heard() -> bool:
            found[:] = [line for line in self.told if text in line]
            return bool(found)

        with self._bell:
            assert self._bell.wait_for(heard, 30), self.told
        return found[0]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What is logged from INFO on, marked as the server marks it."""
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def test_the_next_request_of_a_connection_is_not_the_first_ones(lines: Lines) -> None:
    scripts = (text_script("abc"), SILENT)
    first, second = with_trace(chat_request(body()), FIRST), chat_request(body())
    with run_server(*scripts) as server:
        with connected(server) as sock:
            sock.sendall(first + with_trace(second, SECOND))
            read_until(sock, b"abc")
            while server.pool()["running"] != 1:
                pass
        left = lines.wait_for("the client left")
    assert left.endswith(f"trace={SECOND}")


def test_a_request_without_a_trace_gets_one_for_all_its_lines(lines: Lines) -> None:
    with run_server(SILENT) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body()))
            while server.pool()["running"] != 1:
                pass
        left = lines.wait_for("the client left")
        ended = lines.wait_for("ended ")
    told = left.rpartition("trace=")[2]
    assert len(told) == 32 and f" trace={told} " in ended


@pytest.mark.anyio
async def test_turns_of_a_lane_have_their_own(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ResponsesStore.begin
    asked: list[str] = []

    def begin_once(self: ResponsesStore, *args: Any, **kwargs: Any) -> Any:
        asked.append("")
        if len(asked) == 2:
            raise RuntimeError("a bug")
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(ResponsesStore, "begin", begin_once)
    async with serving(text_script("abc")) as live, live.connect() as socket:
        for trace_id in (FIRST, SECOND):
            await create(socket, metadata={"traceparent": traceparent(trace_id)})
            while (await receive(socket))["type"] not in ("response.completed", "error"):
                pass
    assert lines.wait_for("a turn failed").endswith(f"trace={SECOND}")


@pytest.mark.anyio
async def test_prewarming_at_the_start_leaves_no_trace_behind(tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(json.dumps({"prompt": "hello"}) + "\n")
    play = in_order([text_script("x")])
    engine = await start_thread_engine(lambda: ScriptedCore(play, info=INFO))
    try:
        await warm_lines(build_services(Settings(), engine, byte_assets()), read_prewarm(path))
        assert TRACE_ID.get() == ""
    finally:
        await engine.close()


def test_the_feed_is_nobodys_request(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Feed._look
    traces: list[str] = []

    async def noting(self: Feed) -> Any:
        traces.append(TRACE_ID.get())
        return await look(self)

    monkeypatch.setattr(Feed, "_look", noting)
    headers = {"traceparent": traceparent(FIRST)}
    with run_server(text_script("x")) as server:
        url = f"ws://127.0.0.1:{server.port}/admin/feed"
        with connect(url, additional_headers=headers, proxy=None) as socket:
            while not traces:
                socket.recv()
    assert set(traces) == {""}


def test_a_key_file_read_again_is_not_the_askers_matter(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "RELOAD_S", 0.0)
    path = tmp_path / "keys.toml"
    path.write_text(key_entry(hash_key("k"), "a", False))
    keys = KeyFile(path)
    path.write_text(key_entry(hash_key("k"), "a", False) + key_entry(hash_key("l"), "b", False))
    headers = {"authorization": "Bearer k", "traceparent": traceparent(FIRST)}
    with run_server(text_script("x"), keys=keys) as server:
        server.http.post(CHAT, json=body(), headers=headers).raise_for_status()
    assert "trace=" not in lines.wait_for("read ")


def test_what_asyncio_notices_late_is_nobodys(lines: Lines) -> None:
    async def fail_unseen() -> None:
        async def fail() -> None:
            raise ValueError("lost")

        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        TRACE_ID.set(FIRST)
        del task
        gc.collect()

    asyncio.run(fail_unseen())
    assert "trace=" not in lines.wait_for("exception was never retrieved")


@pytest.mark.parametrize("fault", ["refuses", "fails"])
def test_the_engine_names_the_trace_of_what_it_fails(lines: Lines, fault: str) -> None:
    unplayable = Script((), repeat=True)
    script = unplayable if fault == "refuses" else Script((ScriptStep(error="too hot"),))
    headers = {"traceparent": traceparent(FIRST)}
    with run_server(script) as server:
        server.http.post(CHAT, json=body(), headers=headers)
        (record,) = server.ended()
    told = lines.wait_for(f"request {record.response_id} ")
    assert told.endswith(f"trace={FIRST}"), msgspec.json.encode(lines.told)

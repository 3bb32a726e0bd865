"""SIGTERM: nothing that runs is lost within the grace, and everything is told its end after it.

After vllm-project/vllm#24885, #36666, #36964 and smg-project/smg#1172."""

import json
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from engine.scripted import Script, ScriptFile, ScriptStep, text_script
from tests.faults.live import ENDLESS, body_of, gone, serving, until
from tests.faults.requests import Requests
from tests.issues.test_054_unbounded_buffers import PIECES, dawdling, read_on, text_of
from tests.service.raw import read_until

CHAT = "/v1/chat/completions"
NUM_PIECES = 1500
"""More than kernels and outbox hold."""


def test_twenty_streams_finish_and_what_is_new_is_refused(tmp_path: Path) -> None:
    """A stream that nobody reads does not end before the test wants it to."""
    steps = tuple(ScriptStep((7,), text=piece.encode()) for piece in PIECES[:NUM_PIECES])
    script = ScriptFile(scripts=(Script(steps),))
    with serving(tmp_path, script=script) as server, ExitStack() as stack:
        slow = [stack.enter_context(dawdling(server, NUM_PIECES)) for _ in range(20)]
        begun = [read_until(sock, b"data: ") for sock in slow]
        server.wait_running(20)
        pid = server.engine_pid()
        socket_url = server.url.replace("http", "ws") + "/v1/responses"
        with connect(socket_url, proxy=None) as idle:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not server.ready()["ready"])
            refused = [server.http.post(CHAT, json=body_of(CHAT, stream=True)) for _ in range(5)]
            assert [each.status_code for each in refused] == [503] * 5
            assert all(int(each.headers["retry-after-ms"]) > 0 for each in refused)
            with pytest.raises(ConnectionClosed):
                idle.recv(timeout=30)
            assert idle.close_code == 1012
        assert server.process.poll() is None
        answers = read_on(begun, slow)
        ended = server.wait_end()
        assert ended.code == 0
        assert gone(pid)
    for answer in answers:
        assert b"data: [DONE]" in answer
        assert text_of(answer) == "".join(PIECES[:NUM_PIECES])


@pytest.mark.parametrize(
    ("how", "hangs"), [("grace over", False), ("grace over", True), ("second signal", True)]
)
def test_what_cannot_finish_is_told_its_end(tmp_path: Path, how: str, hangs: bool) -> None:
    grace = "0.5" if how == "grace over" else "300"
    with serving(tmp_path, "--drain", grace, script=ENDLESS) as server:
        requests = Requests(server, closes=True)
        pid = server.engine_pid()
        if hangs:
            server.signal_engine(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.ready()["ready"])
        assert "shutting down" in server.ready()["reason"]
        if how == "second signal":
            until(lambda: "draining" in server.log)
            threading.Event().wait(0.6)  # signals that are closer than 0.5 s are one
            server.process.send_signal(signal.SIGINT)
        requests.check_each_ended_once("shutting down")
        assert requests.close_code == 1012
        ended = server.wait_end()
        assert ended.code == 0
        assert "Traceback" not in ended.log, ended.log
        assert gone(pid)


def test_requests_that_wait_are_refused_and_may_be_repeated(tmp_path: Path) -> None:
    """Those that wait for pages are told at once, those that run finish."""
    answers: list[httpx.Response] = []

    def post(url: str, number: int) -> None:
        text = f"{number} words: " + "word " * 150
        body = body_of(CHAT, stream=False, text=text, max_tokens=200)
        answers.append(httpx.post(url + CHAT, json=body, timeout=60, trust_env=False))

    with serving(tmp_path, "--kv-memory", "20MiB", "--max-context", "512") as server:
        threads = [threading.Thread(target=post, args=(server.url, n)) for n in range(25)]
        for thread in threads:
            thread.start()
        while (stats := server.stats())["running"] + stats["waiting"] + len(answers) < 25:
            pass
        assert stats["waiting"]
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert server.wait_end().code == 0
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 503}, codes
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["retry-after"]
        else:
            assert answer.json()["usage"]["completion_tokens"] == 200


def test_who_does_not_read_the_end_is_not_waited_for(tmp_path: Path) -> None:
    script = ScriptFile(scripts=(text_script("x" * 4000),))
    with serving(tmp_path, script=script) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        data = json.dumps(body_of(CHAT, stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        deaf.sendall(head.encode() + data)
        server.wait_running(1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.ready()["ready"])
        threading.Event().wait(0.6)  # signals that are closer than 0.5 s are one
        server.process.send_signal(signal.SIGTERM)
        ended = server.wait_end()
        assert ended.code == 0
        assert "Traceback" not in ended.log, ended.log
        assert "Cancel" not in ended.log, ended.log

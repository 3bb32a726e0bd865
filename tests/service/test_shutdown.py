"""Draining: what runs may end, what is new is refused, and the server ends in any case."""

import json
import threading

import httpx
import pytest

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason
from service.server import LAST_HURRY_S, LAST_S
from tests.service.calls import CHAT, body, data_of, joined
from tests.service.conftest import LiveServer, held, run_server
from tests.service.raw import chat_request, connected, read_to_end, read_until, unchunked


def frames_of(data: bytes) -> list[str]:
    return data_of(unchunked(data).decode())


def wait_until_draining(server: LiveServer) -> None:
    while server.http.get("/health/ready").status_code != 503:
        pass


def test_running_streams_end_and_new_requests_are_refused() -> None:
    with run_server(held("x" * 60)) as server, connected(server) as sock:
        sock.sendall(chat_request(body(stream=True)))
        first = read_until(sock, b"data: ", 2)
        server.stop()
        wait_until_draining(server)
        refused = server.http.post(CHAT, json=body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_is_overloaded"
        assert "is draining" in refused.json()["error"]["message"]
        assert refused.headers["retry-after-ms"]
        server.go_on()
        *frames, done = frames_of(first + read_to_end(sock))
        assert done == "[DONE]"
        assert joined([json.loads(frame) for frame in frames]) == "x" * 60


def test_a_second_stop_ends_every_stream_with_an_error_frame() -> None:
    endless = Script((ScriptStep((97,), delay_s=0.01),), repeat=True)
    with run_server(endless) as server:
        ends: list[bytes] = []

        def read() -> None:
            with connected(server) as sock:
                sock.sendall(chat_request(body(stream=True)))
                ends.append(read_to_end(sock))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        while server.pool()["running"] != 3:
            pass
        server.stop()
        wait_until_draining(server)
        server.stop()
        for thread in threads:
            thread.join()
    assert len(ends) == 3
    for end in ends:
        error = json.loads(frames_of(end)[-1])["error"]
        assert error["code"] == "server_is_overloaded"
    assert [r.finish_reason for r in server.records] == [FinishReason.ABORT] * 3


def test_whole_answers_are_told_of_the_abort() -> None:
    with run_server(Script(finish=None)) as server:
        answers: list[httpx.Response] = []

        def post() -> None:
            answers.append(httpx.post(server.url + CHAT, json=body(), trust_env=False, timeout=30))

        thread = threading.Thread(target=post)
        thread.start()
        while server.pool()["running"] != 1:
            pass
        server.stop()
        wait_until_draining(server)
        server.stop()
        thread.join()
    (answer,) = answers
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_overloaded"


def test_an_idle_server_ends_at_once() -> None:
    with run_server(text_script("x")) as server:
        assert server.http.get("/health").status_code == 200
        server.stop()
    assert not server.engine.alive


def test_each_stop_says_within_what_time_a_sane_server_has_ended() -> None:
    with run_server(Script(finish=None)) as server, connected(server) as sock:
        sock.sendall(chat_request(body(stream=True)))
        while server.pool()["running"] != 1:
            pass
        assert server.bounds == []
        server.stop()
        wait_until_draining(server)
        server.stop()
        read_to_end(sock)
    assert server.bounds[:2] == [5.0 + LAST_S, LAST_HURRY_S]


def test_a_drain_that_fails_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would hear of it otherwise, and nothing else would end the server."""

    async def fail(grace_s: float) -> None:
        raise RuntimeError("injected")

    with run_server(text_script("x")) as server:
        monkeypatch.setattr(server.engine, "drain", fail)
    assert "the drain failed" in caplog.text

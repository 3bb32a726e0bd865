"""Clients that do not read: their own request waits, then ends; nobody else notices."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socket import socket

import msgspec
import pytest

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason
from service.config import Settings
from tests.service.calls import CHAT, ask, body, content, data_of, joined
from tests.service.conftest import INFO, MODEL, LiveServer, quick, run_server
from tests.service.raw import (
    chat_request,
    connected,
    masked_frame,
    open_websocket,
    read_to_end,
    read_until,
    unchunked,
)

FLOOD = Script((ScriptStep(tuple(b"x" * 64)),), repeat=True)
WORDY = Script((ScriptStep((7,), text=b"abcde" * 20),), repeat=True)
"""However few frames come of it, its text alone fills every buffer soon."""
WIDE = msgspec.structs.replace(INFO, max_context=1 << 20, num_pages=1 << 17)
NEIGHBOUR = 320
END_OF_CHUNKS = b"\r\n0\r\n\r\n"
CREATE = json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}).encode()


def tight(stall_s: float) -> Settings:
    return quick(write_stall_s=stall_s, send_buffer_bytes=4096)


@contextmanager
def unread(server: LiveServer, transport: str) -> Iterator[socket]:
    """A client of an endless answer that reads nothing of it."""
    with connected(server, receive_buffer=4096) as sock:
        if transport == "sse":
            sock.sendall(chat_request(body(stream=True, max_tokens=1_000_000)))
        else:
            open_websocket(sock)
            sock.sendall(masked_frame(CREATE))
        yield sock


def wait_until_stalled(server: LiveServer) -> int:
    """The output tokens of all requests, once a neighbour's whole answer has brought no others."""
    outputs, asked = -1, 0
    while (now := server.pool()["num_output_tokens"]) != outputs or now <= asked:
        assert ask(server, max_tokens=NEIGHBOUR)["usage"]["completion_tokens"] == NEIGHBOUR
        asked += NEIGHBOUR
        outputs = now + NEIGHBOUR
    return now


@pytest.mark.parametrize("transport", ["sse", "websocket"])
def test_a_client_that_reads_nothing_is_dropped_and_its_generation_cancelled(
    transport: str,
) -> None:
    with (
        run_server(FLOOD, info=WIDE, settings=tight(0.4)) as server,
        unread(server, transport),
    ):
        (record,) = server.ended()
        assert record.finish_reason is FinishReason.ABORT
        assert record.disconnected_ns > 0
        pool = server.wait_for_idle()
        assert pool["referenced"] == 0


def test_stalled_clients_do_not_fill_the_queue_for_ever() -> None:
    """Before, 69 of them shut everybody out until the server ended."""
    with (
        run_server(FLOOD, info=WIDE, settings=tight(0.4), max_open=8) as server,
        ExitStack() as stalled,
    ):
        for transport in ("sse", "websocket") * 4:
            stalled.enter_context(unread(server, transport))
        while server.pool()["running"] < 8:
            pass
        while (answer := server.http.post(CHAT, json=body(max_tokens=3))).status_code == 503:
            pass
        assert content(answer.json()) == "xxx"


def test_a_reader_that_is_slow_but_steady_is_not_dropped() -> None:
    total = 4000
    with run_server(WORDY, info=WIDE, settings=tight(0.4)) as server:
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(chat_request(body(stream=True, max_tokens=total)))
            start_s = time.monotonic()
            answer = read_until(sock, b"\r\n\r\n")
            while END_OF_CHUNKS not in answer:
                time.sleep(0.002)
                answer += sock.recv(1024)
            took_s = time.monotonic() - start_s
        *frames, _ = data_of(unchunked(answer).decode())
        assert joined([json.loads(frame) for frame in frames]) == "abcde" * 20 * total
        assert took_s > 0.4, "it was no slower than the limit"


def test_a_reader_too_slow_for_the_kernel_to_ask_for_more_is_not_dropped() -> None:
    """It would ask when a third of its buffer is free: at this pace after seconds."""
    settings = quick(write_stall_s=1.0, send_buffer_bytes=64 << 10)
    with (
        run_server(FLOOD, info=WIDE, settings=settings) as server,
        unread(server, "sse") as sock,
    ):
        for _ in range(60):
            assert sock.recv(1024)
            time.sleep(0.05)
        assert not server.records


def test_a_stall_that_ends_in_time_loses_nothing() -> None:
    with run_server(WORDY, info=WIDE, settings=tight(30.0)) as server:
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(chat_request(body(stream=True, max_tokens=12_000)))
            assert wait_until_stalled(server) < 8_000, "it never waited for the client"
            answer = read_until(sock, END_OF_CHUNKS)
        *frames, _ = data_of(unchunked(answer).decode())
        assert joined([json.loads(frame) for frame in frames]) == "abcde" * 20 * 12_000
        assert len(frames) < 12_000, "what was said during the stall did not come together"


def test_a_drain_cuts_stalled_clients_off_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        run_server(FLOOD, info=WIDE, settings=tight(60.0)) as server,
        unread(server, "sse"),
        unread(server, "websocket"),
    ):
        wait_until_stalled(server)
        start_s = time.monotonic()
        server.stop()
        server.stop()
        while not server.loop.is_closed():
            pass
    assert time.monotonic() - start_s < 30.0  # of the minute that a stall may last
    assert [record for record in caplog.records if record.exc_info] == []
    assert [r.finish_reason for r in server.records[-2:]] == [FinishReason.ABORT] * 2


def test_pings_of_a_client_that_reads_nothing_are_not_hoarded() -> None:
    """A paused client is owed one pong, for its latest ping."""
    with (
        run_server(FLOOD, info=WIDE, settings=tight(60.0)) as server,
        unread(server, "websocket") as sock,
    ):
        wait_until_stalled(server)
        sock.sendall(masked_frame(b"p" * 120, opcode=9) * 1500)
        sock.sendall(masked_frame(b"last", opcode=9))
        wait_until_stalled(server)  # by then it has taken the pings
        num_pongs, tail = 0, b""
        while b"\x8a\x04last" not in tail:
            piece = sock.recv(1 << 16)
            num_pongs += piece.count(b"p" * 120)
            tail = tail[-8:] + piece
        assert num_pongs < 10


def test_an_answer_nobody_takes_does_not_keep_its_connection() -> None:
    """Its bytes fit the server's buffer, so that no writer waits; the watch still sees them."""
    settings = quick(write_stall_s=0.4, send_buffer_bytes=4096, write_buffer_bytes=8 << 20)
    with (
        run_server(text_script("x" * 400_000, 4096), info=WIDE, settings=settings) as server,
        connected(server, receive_buffer=4096) as sock,
    ):
        sock.sendall(chat_request(body()))
        server.ended()
        while len(server.server.connections):
            pass
        assert len(read_to_end(sock)) < 400_000

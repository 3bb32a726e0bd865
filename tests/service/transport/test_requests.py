"""One connection's requests: whole, strict, in order, and one answer at a time."""

import json
import logging
from typing import Any

import httpx
import pytest

from engine.scripted import Script, text_script
from engine.types import FinishReason
from tests.service.calls import CHAT, ask, body, content, data_of, joined
from tests.service.conftest import LiveServer, held, run_server
from tests.service.raw import (
    chat_request,
    connected,
    masked_frame,
    open_websocket,
    read_to_end,
    unchunked,
)

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CLOSING = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
SILENT = Script(finish=None)


def answers(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer of a known length."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        found.append((int(head.split()[1]), rest[:length]))
        data = rest[length:]
    return found


def wait_for_running(server: LiveServer, number: int) -> None:
    while server.pool()["running"] != number:
        pass


def test_a_stream_with_a_request_behind_it_is_not_written_into() -> None:
    """Half-closed as well: before, interim and second answers went into the stream."""
    with (
        run_server(text_script("abcdefghij", delay_s=0.01)) as server,
        connected(server) as sock,
    ):
        sock.sendall(chat_request(body(stream=True)) + HEALTH + CLOSING)
        sock.shutdown(1)
        data = read_to_end(sock)
    stream, _, rest = data.partition(b"\r\n0\r\n\r\n")
    *frames, done = data_of(unchunked(stream + b"\r\n0\r\n\r\n").decode())
    assert done == "[DONE]"
    assert joined([json.loads(frame) for frame in frames]) == "abcdefghij"
    assert [status for status, _ in answers(rest)] == [200, 200]


def test_pipelined_requests_are_answered_in_order() -> None:
    with (
        run_server(text_script("one"), text_script("two")) as server,
        connected(server) as sock,
    ):
        sock.sendall(chat_request(body()) + chat_request(body()) + CLOSING)
        first, second, health = answers(read_to_end(sock))
    assert content(json.loads(first[1])) == "one"
    assert content(json.loads(second[1])) == "two"
    assert health[0] == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reset_ends_a_request_that_has_others_behind_it(streamed: bool) -> None:
    with run_server(SILENT) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=streamed)))
            wait_for_running(server, 1)
            sock.sendall(chat_request(body()) + HEALTH)
            server.http.get("/health")
        pool = server.wait_for_idle()
        assert pool["num_requests"] == 1
        (record,) = server.ended()
        assert record.finish_reason is FinishReason.ABORT
        assert record.disconnected_ns > 0


def test_what_follows_without_bound_is_dropped_and_the_answer_is_whole() -> None:
    with run_server(held("abc")) as server, connected(server) as sock:
        sock.sendall(chat_request(body(stream=True)))
        wait_for_running(server, 1)
        sock.sendall(HEALTH * 4000)
        server.http.get("/health")
        server.go_on()
        *frames, done = data_of(unchunked(read_to_end(sock)).decode())
    assert done == "[DONE]"
    assert joined([json.loads(frame) for frame in frames]) == "abc"


def test_rubbish_behind_a_request_does_not_spoil_its_answer() -> None:
    with run_server(held("abc")) as server, connected(server) as sock:
        sock.sendall(chat_request(body()) + b"rubbish\r\n\r\n")
        wait_for_running(server, 1)
        server.go_on()
        ((status, data),) = answers(read_to_end(sock))
    assert status == 200
    assert content(json.loads(data)) == "abc"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_http_1_0_client_gets_an_answer_that_ends_with_the_connection(streamed: bool) -> None:
    with run_server(text_script("old times")) as server, connected(server) as sock:
        sock.sendall(chat_request(body(stream=streamed), version="1.0"))
        head, _, data = read_to_end(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if streamed:
        *frames, done = data_of(data.decode())
        assert done == "[DONE]"
        assert joined([json.loads(frame) for frame in frames]) == "old times"
    else:
        assert content(json.loads(data)) == "old times"


@pytest.mark.parametrize("upgrade", ["h2c", "TLS/1.0", "h2c, websocket"])
def test_an_upgrade_that_is_not_spoken_is_ignored(upgrade: str) -> None:
    """Before, the body was lost: the parser took it for the other protocol's."""
    data = json.dumps(body()).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        f"upgrade: {upgrade}\r\ncontent-length: {len(data)}\r\n\r\n"
    ).encode()
    with run_server(text_script("as before")) as server, connected(server) as sock:
        sock.sendall(head + data[:5])
        server.http.get("/health")
        sock.sendall(data[5:] + CLOSING)
        first, second = answers(read_to_end(sock))
    assert content(json.loads(first[1])) == "as before"
    assert second[0] == 200


POST = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n".encode()
MALFORMED = {
    "both lengths": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, turned": POST
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "the same length twice": POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "a list of lengths": POST + b"content-length: 2, 2\r\n\r\n{}",
    "a signed length": POST + b"content-length: +2\r\n\r\n{}",
    "bare LF after the request line": b"GET /health HTTP/1.1\nhost: localhost\r\n\r\n",
    "bare LF after a field": b"GET /health HTTP/1.1\r\nhost: localhost\nx: y\r\n\r\n",
    "bare LF at the end": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\n",
    "bare CR": b"GET /health HTTP/1.1\r\nhost: localhost\rx: y\r\n\r\n",
    "folded field": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: y\r\n z\r\n\r\n",
    "space before colon": b"GET /health HTTP/1.1\r\nhost : localhost\r\n\r\n",
    "NUL": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n",
    "chunk size with bare LF": POST + b"transfer-encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    "chunk longer than its size": POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}{}0\r\n\r\n",
    "coding of HTTP/1.0": b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two codings": POST
    + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "no target": b"GET  HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.fixture(scope="module")
def server() -> Any:
    with run_server(text_script("x")) as running:
        yield running


@pytest.mark.parametrize("name", MALFORMED)
def test_framing_that_two_parties_could_read_differently_is_refused(
    server: LiveServer, name: str
) -> None:
    with connected(server) as sock:
        sock.sendall(MALFORMED[name])
        ((status, data),) = answers(read_to_end(sock))
    assert status == 400, data
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"transfer-encoding: identity\r\n\r\n{}", 501),
        (b"GET /health\r\n\r\n", 505),
        (b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n", 505),
        (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    ],
)
def test_what_is_not_spoken_is_told(server: LiveServer, request_bytes: bytes, status: int) -> None:
    with connected(server) as sock:
        sock.sendall(request_bytes)
        ((answered, _),) = answers(read_to_end(sock))
    assert answered == status


def test_a_text_frame_that_is_no_text_closes_quietly(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), connected(server) as sock:
        open_websocket(sock)
        sock.sendall(masked_frame(b"\xff\xfe"))
        closing = read_to_end(sock)
    assert closing[0] == 0x88
    assert int.from_bytes(closing[2:4], "big") == 1007
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_early_answer_reaches_a_client_that_is_still_sending(server: LiveServer) -> None:
    big = b"x" * (8 << 20)
    answer = httpx.post(server.url + "/nowhere", content=big, trust_env=False)
    assert answer.status_code == 404
    assert content(ask(server)) == "x"

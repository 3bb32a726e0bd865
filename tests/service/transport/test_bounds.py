"""What one client, or all of them together, may make the server hold, and for how long."""

import json
from contextlib import ExitStack, suppress
from socket import SHUT_RDWR, socket

import pytest

from engine.scripted import Script, text_script
from service.transport.frames import MAX_SMALL_FRAMES
from tests.service.calls import CHAT, ask, body, content
from tests.service.conftest import MODEL, LiveServer, quick, run_server
from tests.service.raw import (
    chat_request,
    connected,
    masked_frame,
    open_websocket,
    read_to_end,
    read_until,
)

SMALL = 1 << 16
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n".encode()
SILENT = Script(finish=None)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def code_of(answer: bytes) -> str:
    code: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    return code


def close_code_of(frame: bytes) -> int:
    assert frame[0] == 0x88, frame
    return int.from_bytes(frame[2:4], "big")


@pytest.mark.parametrize(
    "sent", [b"x-a: " + b"b" * (1 << 20), b"x-%d: b\r\n" % 1 * 2000, b"x: y\r\n" * 50_000]
)
def test_a_header_without_end_is_refused(sent: bytes) -> None:
    with run_server(text_script("x")) as server, connected(server) as sock:
        sock.sendall(HEAD + sent)
        answer = read_until(sock, b"}}")
        assert status_of(answer) == 431
        assert code_of(answer) == "header_too_large"


def test_a_target_without_end_is_refused() -> None:
    with run_server(text_script("x")) as server, connected(server) as sock:
        sock.sendall(b"GET /" + b"a" * (1 << 18))
        assert status_of(read_until(sock, b"}}")) == 431


@pytest.mark.parametrize("sent", [b"GET /hea", HEAD, HEAD + b"x-a: b"])
def test_a_header_that_stops_is_not_waited_for(sent: bytes) -> None:
    with run_server(text_script("x"), settings=quick(header_s=0.2)) as server:
        with connected(server) as sock:
            sock.sendall(sent)
            answer = read_to_end(sock)
        assert status_of(answer) == 408
        assert code_of(answer) == "timeout"


def test_a_header_that_dribbles_is_not_waited_for() -> None:
    with run_server(text_script("x"), settings=quick(header_s=0.3)) as server:
        with connected(server) as sock:
            sock.settimeout(0.05)
            sock.sendall(HEAD)
            answer = b""
            while not answer:
                sock.sendall(b"x: y\r\n")
                try:
                    answer = sock.recv(1 << 16)
                except TimeoutError:
                    continue
        assert status_of(answer) == 408


@pytest.mark.parametrize(
    "before", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"]
)
def test_an_idle_connection_is_closed(before: bytes) -> None:
    with run_server(text_script("x"), settings=quick(header_s=0.2, idle_s=0.2)) as server:
        with connected(server) as sock:
            if before:
                sock.sendall(before)
            answer = read_to_end(sock)
        assert answer == b"" or status_of(answer) == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [(CHAT, 408), ("/v1/messages", 504), ("/v1/responses", 408), ("/tokenize", 408)],
)
def test_a_body_that_stops_is_not_waited_for(path: str, status: int) -> None:
    """The Messages API has a status of its own for it."""
    with run_server(text_script("x"), settings=quick(body_silence_s=0.2)) as server:
        with connected(server) as sock:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
            sock.sendall(head.encode() + b'{"model":')
            answer = read_to_end(sock)
        assert status_of(answer) == status
        assert b"connection: close" in answer.lower()
        assert server.pool()["num_requests"] == 0


def test_a_body_that_dribbles_is_not_waited_for() -> None:
    with run_server(text_script("x"), settings=quick(body_s=0.3)) as server:
        with connected(server) as sock:
            sock.settimeout(0.05)
            sock.sendall(HEAD + b"content-length: 100000\r\n\r\n")
            answer = b""
            while not answer:
                sock.sendall(b" ")
                try:
                    answer = sock.recv(1 << 16)
                except TimeoutError:
                    continue
        assert status_of(answer) == 408


def stalled_body(stack: ExitStack, server: LiveServer, num_bytes: int) -> socket:
    sock = stack.enter_context(connected(server))
    sock.sendall(HEAD + b"content-length: %d\r\n\r\n" % (num_bytes + 1) + b" " * num_bytes)
    return sock


def wait_until_held(server: LiveServer, num_bytes: int) -> None:
    while server.server.intake.num_bytes < num_bytes:
        pass


def test_bodies_together_are_bounded_and_small_ones_unaffected() -> None:
    settings = quick(request_bytes=4 << 20)
    with run_server(text_script("x"), settings=settings) as server:
        with ExitStack() as stack:
            for _ in range(3):
                stalled_body(stack, server, 1 << 20)
            wait_until_held(server, 3 << 20)
            refused = stack.enter_context(connected(server))
            refused.sendall(HEAD + b"content-length: 2000000\r\n\r\n" + b" " * 1_200_000)
            answer = read_until(refused, b"}}")
            assert status_of(answer) == 503
            assert code_of(answer) == "server_is_overloaded"
            assert b"retry-after:" in answer.lower()
            assert server.server.intake.num_bytes <= 4 << 20
            assert content(ask(server)) == "x"
        while server.server.intake.num_bytes:
            pass
        text = "y" * 2000
        assert content(ask(server, messages=[{"role": "user", "content": text}])) == "x"


def test_a_request_holds_what_it_brought_until_its_answer_has_ended() -> None:
    big = body(metadata={"a": "b"}, user="u" * 100, messages=[{"role": "user", "content": "hi"}])
    settings = quick(request_bytes=1 << 20)
    with run_server(SILENT, settings=settings) as server:
        with connected(server) as sock:
            request = chat_request(big)
            sock.sendall(request)
            while server.pool()["running"] != 1:
                pass
            assert 0 < server.server.intake.num_bytes < len(request)
        server.wait_for_idle()
        while server.server.intake.num_bytes:
            pass


def test_connections_are_bounded_and_one_too_many_is_told() -> None:
    with (
        run_server(text_script("x"), settings=quick(connections=4)) as server,
        ExitStack() as stack,
    ):
        idle = [stack.enter_context(connected(server)) for _ in range(4)]
        while len(server.server.connections) < 4:
            pass
        with connected(server) as sock:
            answer = read_to_end(sock)
            assert status_of(answer) == 503
            assert b"retry-after:" in answer.lower()
        idle[0].shutdown(SHUT_RDWR)
        while len(server.server.connections) == 4:
            pass
        assert content(ask(server)) == "x"


def create(**fields: object) -> bytes:
    return json.dumps({"type": "response.create", "model": MODEL, "input": "hi", **fields}).encode()


def test_running_turns_of_sockets_count_and_one_too_many_is_refused() -> None:
    """Their instructions and tools live as long as they run."""
    settings = quick(request_bytes=3 << 20)
    large = "t" * (1 << 20)
    tools = [{"type": "function", "name": "f", "description": large, "parameters": {}}]
    with run_server(SILENT, settings=settings) as server, connected(server) as sock:
        open_websocket(sock)
        for lane in ("a", "b"):
            sock.sendall(masked_frame(create(stream_id=lane, client_metadata={"x": large})))
        while server.pool()["running"] != 2:
            pass
        wait_until_held(server, 2 << 20)
        sock.sendall(masked_frame(create(stream_id="c", tools=tools)))
        assert b"server_is_overloaded" in read_until(sock, b"server_is_overloaded")
        sock.sendall(masked_frame(create(stream_id="d")))
        while server.pool()["running"] != 3:
            pass
        sock.shutdown(SHUT_RDWR)
        server.wait_for_idle()
        while server.server.intake.num_bytes:
            pass


def test_messages_of_sockets_that_do_not_end_are_bounded_together() -> None:
    settings = quick(request_bytes=2 << 20)
    half = masked_frame(b" " * (4 << 20))[: 1 << 20]
    with run_server(text_script("x"), settings=settings) as server, ExitStack() as stack:
        first = stack.enter_context(connected(server))
        second = stack.enter_context(connected(server))
        for sock in (first, second):
            open_websocket(sock)
        first.sendall(half)
        wait_until_held(server, (1 << 20) - 100)
        second.sendall(half)
        wait_until_held(server, (2 << 20) - 200)
        second.sendall(bytes(1 << 19))
        second.sendall(bytes(1 << 10))
        assert close_code_of(read_to_end(second)) == 1013
        assert content(ask(server)) == "x"
        first.shutdown(SHUT_RDWR)
        while server.server.intake.num_bytes:
            pass


def test_a_message_that_stops_is_not_waited_for() -> None:
    settings = quick(body_s=0.2)
    with run_server(text_script("x"), settings=settings) as server, connected(server) as sock:
        open_websocket(sock)
        sock.sendall(masked_frame(b"{}", fin=False))
        assert close_code_of(read_to_end(sock)) == 1008


@pytest.mark.parametrize(("opcode", "payload"), [(0, b""), (0, b"a"), (10, b""), (9, b"p")])
def test_a_flood_of_small_frames_ends_its_connection(opcode: int, payload: bytes) -> None:
    """A megabyte of them would keep the event loop for seconds."""
    first = masked_frame(b"{", fin=False) if opcode == 0 else b""
    flood = masked_frame(payload, opcode=opcode, fin=opcode != 0) * (4 * MAX_SMALL_FRAMES)
    with run_server(text_script("x")) as server, connected(server) as sock:
        open_websocket(sock)
        with suppress(ConnectionError):
            sock.sendall(first + flood)
        with suppress(ConnectionError):
            assert b"too many small frames" in read_to_end(sock)
        assert content(ask(server)) == "x"
        server.wait_for_idle()

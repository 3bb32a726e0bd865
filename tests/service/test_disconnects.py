"""Clients that leave, half-leave or dawdle: only their own request notices.

After sgl-project/mini-sglang#15, ggml-org/llama.cpp#24496 and vllm-project/vllm#54947, where the
request of a client that was gone ran to its limit, streamed or not."""

import json
import socket
import struct
import threading

import httpx
import msgspec
import pytest

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason
from service.events import RequestRecord
from tests.service.calls import CHAT, ask, body, content, data_of, joined, stream
from tests.service.conftest import INFO, LiveServer, held, quick, run_server
from tests.service.raw import chat_request, connected, read_to_end, read_until, unchunked

ENDLESS = Script((ScriptStep((97,), delay_s=0.002),), repeat=True)
SILENT = Script(finish=None)


def only_record(server: LiveServer) -> RequestRecord:
    (record,) = server.ended()
    server.wait_for_idle()
    return record


def wait_for_running(server: LiveServer, number: int = 1) -> None:
    while server.pool()["running"] != number:
        pass


def test_a_stream_closed_after_three_chunks_is_aborted() -> None:
    with run_server(ENDLESS) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=True)))
            read_until(sock, b"data: ", 3)
        record = only_record(server)
        assert record.finish_reason is FinishReason.ABORT
        assert record.disconnected_ns > 0
        assert record.usage is not None
        output_tokens = record.usage.output_tokens
        assert 0 < output_tokens < 4000
        assert server.pool()["num_output_tokens"] == output_tokens
        assert server.pool()["referenced"] == 0


@pytest.mark.parametrize("script", [ENDLESS, SILENT])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_before_its_answer_is_aborted(script: Script, streamed: bool) -> None:
    with run_server(script) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=streamed)))
            wait_for_running(server)
        record = only_record(server)
        assert record.finish_reason is FinishReason.ABORT
        assert record.disconnected_ns > 0


def test_a_reset_connection_is_aborted() -> None:
    with run_server(SILENT) as server:
        with connected(server) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(chat_request(body()))
            wait_for_running(server)
        assert only_record(server).finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_closes_only_its_sending_side_gets_its_answer(streamed: bool) -> None:
    with run_server(held("half and half, and then some more")) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=streamed)))
            wait_for_running(server)
            sock.shutdown(socket.SHUT_WR)
            server.http.get("/health")  # by then it knows
            server.go_on()
            answer = read_to_end(sock)
        if streamed:
            *frames, done = data_of(unchunked(answer).decode())
            assert done == "[DONE]"
            assert joined([json.loads(f) for f in frames]) == "half and half, and then some more"
        else:
            whole = json.loads(answer.rpartition(b"\r\n\r\n")[2])
            assert content(whole) == "half and half, and then some more"
        assert only_record(server).finish_reason is FinishReason.STOP


def test_half_closing_at_once_gets_the_whole_stream() -> None:
    with run_server(text_script("abc", delay_s=0.01)) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=True)))
            sock.shutdown(socket.SHUT_WR)
            *frames, done = data_of(unchunked(read_to_end(sock)).decode())
        assert done == "[DONE]"
        assert joined([json.loads(f) for f in frames]) == "abc"


def test_leaving_while_the_body_is_sent_runs_nothing() -> None:
    with run_server(ENDLESS) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body())[:-5])
        assert content(ask(server, max_tokens=1)) == "a"
        assert server.pool()["num_requests"] == 1


def test_neighbours_of_a_leaver_get_their_whole_answers() -> None:
    scripts = (text_script("x" * 300, 1, delay_s=0.002),)
    with run_server(*scripts) as server:
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(content(ask(server)))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        while server.pool()["num_requests"] < 3:
            pass
        for _ in range(5):
            with connected(server) as sock:
                sock.sendall(chat_request(body(stream=True)))
                read_until(sock, b"data: ", 2)
        for thread in threads:
            thread.join()
        assert texts == ["x" * 300] * 3


def test_a_slow_reader_pauses_itself_alone_and_loses_nothing() -> None:
    """It reads nothing: its generation stops when buffers and credits are full."""
    total = 4000
    tight = quick(send_buffer_bytes=4096)
    wide = msgspec.structs.replace(INFO, max_context=65536, num_pages=8192)
    # However few frames it comes in, a tenth of it is more than all buffers hold.
    script = Script((ScriptStep((7,), text=b"abcde" * 100),), repeat=True)
    with run_server(script, settings=tight, info=wide) as server:
        with connected(server, receive_buffer=4096) as slow:
            slow.sendall(chat_request(body(stream=True, max_tokens=total)))
            first = read_until(slow, b"data: ", 2)
            outputs = -1
            while (now := server.pool()["num_output_tokens"]) != outputs:
                outputs = now
                ask(server, max_tokens=50)
                outputs += 50
            assert server.pool()["num_output_tokens"] == outputs
            frames = stream(server, max_tokens=2000)
            assert len(joined(frames)) == 2000 * 500
            pool = server.pool()
            assert pool["running"] == 1
            assert pool["num_output_tokens"] == outputs + 2000
            assert outputs < total / 2
            rest = first + read_until(slow, b"\r\n0\r\n\r\n")
        *frames, _ = data_of(unchunked(rest).decode())
        assert joined([json.loads(f) for f in frames]) == "abcde" * 100 * total


def test_many_small_requests_leave_nothing_behind() -> None:
    with run_server(text_script("ok")) as server:
        for _ in range(300):
            assert content(ask(server)) == "ok"
        server.ended(300)
        pool = server.wait_for_idle()
        assert pool["num_requests"] == 300
        assert pool["free"] == pool["total"]


def test_a_keep_alive_connection_serves_the_next_request_after_a_stream() -> None:
    with run_server(text_script("ok")) as server, httpx.Client(trust_env=False) as client:
        for streamed in (True, False, True):
            answer = client.post(server.url + CHAT, json=body(stream=streamed))
            assert answer.status_code == 200
            assert answer.headers.get("connection") != "close"

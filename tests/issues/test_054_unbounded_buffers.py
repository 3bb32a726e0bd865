"""After Kludex/starlette#1012, anomalyco/opencode#19423 and #31094: who does not read pauses only
itself, holds little, and gets every piece when it reads on."""

import json
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.scripted import Script, ScriptFile, ScriptStep
from tests.faults.live import FaultyServer, body_of, ends_of, serving, until
from tests.service.raw import read_to_end, read_until, unchunked

CHAT = "/v1/chat/completions"
NUM_TOKENS = 4000
MOST_AHEAD = 1000
"""Pieces that may be on their way to a client that does not read."""
PIECES = [f"{number:04d}" + "x" * 250 for number in range(NUM_TOKENS)]


def request(max_tokens: int) -> bytes:
    data = json.dumps(body_of(CHAT, stream=True, max_tokens=max_tokens)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    return head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def text_of(data: bytes) -> str:
    frames = [
        json.loads(line.removeprefix("data: "))
        for line in unchunked(data).decode().splitlines()
        if line.startswith("data: {")
    ]
    return "".join(
        choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"]
    )


def check(folder: Path, num_slow: int, read_at_once: int) -> None:
    """`num_slow` clients that stop reading, or read that many bytes at a time, and quick ones."""
    steps = tuple(ScriptStep((7,), text=piece.encode()) for piece in PIECES)
    script = ScriptFile(scripts=(Script(steps),))
    with serving(folder, script=script) as server, ExitStack() as stack:
        slow = [stack.enter_context(socket.socket()) for _ in range(num_slow)]
        for sock in slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(60)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(request(NUM_TOKENS))
        begun = [read_until(sock, b"data: ") for sock in slow]
        wait_for_pause(server)
        paused = server.stats()
        assert paused["running"] == num_slow
        assert paused["paused"] == num_slow
        # What the kernel holds (64 KiB, which it doubles) is some 450 pieces; the outbox is 256.
        assert paused["num_output_tokens"] < num_slow * MOST_AHEAD
        before = rss_bytes(server.process.pid)
        for _ in range(20):
            quick = server.http.post(CHAT, json=body_of(CHAT, stream=True, max_tokens=50))
            assert ends_of(CHAT, quick.text) == [{"done": True}]
            if read_at_once:
                begun = [
                    each + sock.recv(read_at_once) for each, sock in zip(begun, slow, strict=True)
                ]
        assert server.stats()["running"] == num_slow
        assert rss_bytes(server.process.pid) - before < 32 << 20
        ends: dict[int, bytes] = {}

        def read_on(number: int) -> None:
            ends[number] = begun[number] + read_to_end(slow[number])

        threads = [threading.Thread(target=read_on, args=(n,)) for n in range(num_slow)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ends) == num_slow
        for data in ends.values():
            assert text_of(data) == "".join(PIECES)


def wait_for_pause(server: FaultyServer) -> None:
    """Until the engine has nothing more to say to anybody."""
    seen = [-1]

    def still() -> bool:
        threading.Event().wait(0.2)
        seen.append(server.stats()["num_output_tokens"])
        return seen[-1] == seen[-2] > 0

    until(still)


def test_four_clients_that_do_not_read(tmp_path: Path) -> None:
    check(tmp_path, 4, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_clients_that_read_ten_bytes_at_a_time(tmp_path: Path) -> None:
    check(tmp_path, 60, 10)

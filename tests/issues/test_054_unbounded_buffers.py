"""After Kludex/starlette#1012, anomalyco/opencode#19423 and #31094: who does not read pauses only
itself, holds little, and gets every piece when it reads on."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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


@contextmanager
def dawdling(server: FaultyServer, max_tokens: int) -> Iterator[socket.socket]:
    """A client that has asked and whose kernel takes little while it does not read."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request(max_tokens))
        yield sock


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
        slow = [stack.enter_context(dawdling(server, NUM_TOKENS)) for _ in range(num_slow)]
        begun = [read_until(sock, b"data: ") for sock in slow]
        paused = wait_for_pause(server, num_slow)
        assert paused["running"] == num_slow
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
        for data in read_on(begun, slow):
            assert text_of(data) == "".join(PIECES)


def read_on(begun: list[bytes], slow: list[socket.socket]) -> list[bytes]:
    """The whole answers of clients that read again, all at once."""
    with ThreadPoolExecutor(len(slow)) as pool:
        return [
            first + rest for first, rest in zip(begun, pool.map(read_to_end, slow), strict=True)
        ]


def wait_for_pause(server: FaultyServer, number: int) -> dict[str, int]:
    """Until so many requests want for credit and get none."""
    seen: list[dict[str, int]] = [{}]

    def still() -> bool:
        threading.Event().wait(0.2)
        seen.append(server.stats())
        return seen[-1] == seen[-2] and seen[-1]["paused"] == number

    until(still)
    return seen[-1]


def test_four_clients_that_do_not_read(tmp_path: Path) -> None:
    check(tmp_path, 4, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_clients_that_read_ten_bytes_at_a_time(tmp_path: Path) -> None:
    check(tmp_path, 60, 10)

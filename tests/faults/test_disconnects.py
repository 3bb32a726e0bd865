"""Clients that vanish at random moments: law 2 holds after each, on the real model."""

import json
import random
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.live import PATHS, FaultyServer, body_of, serving, until


def vanish(server: FaultyServer, rng: random.Random) -> None:
    """Send a request, or a part of it, and go away a little later, politely or not."""
    path, stream = rng.choice(PATHS), rng.random() < 0.7
    text = f"{rng.randint(0, 4)} " + "and so it goes on " * rng.choice((1, 20, 120))
    data = json.dumps(body_of(path, stream=stream, text=text, max_tokens=1000)).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    request = head.encode() + data
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        whole = rng.random() < 0.9
        sock.sendall(request if whole else request[: rng.randrange(len(request))])
        threading.Event().wait(rng.random() * 0.25)
        if whole and rng.random() < 0.5:
            sock.settimeout(0.001)
            with suppress(TimeoutError):
                sock.recv(rng.choice((1, 100, 10_000)))
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def check_pages(server: FaultyServer) -> dict[str, int]:
    """Pages recounted from tree and tables, whatever runs at this moment."""
    audit = server.http.get("/test/audit")
    assert audit.status_code == 200, audit.text
    pool: dict[str, int] = audit.json()
    assert sum(pool[state] for state in ("free", "cached", "referenced", "pinned")) == pool["total"]
    return pool


def soak(folder: Path, times: int) -> None:
    """Three at a time; some overlap, some find the server idle."""
    with serving(folder, "--kv-memory", "64MiB", "--max-context", "2048") as server:

        def client(seed: int, count: int) -> None:
            rng = random.Random(seed)
            for _ in range(count):
                vanish(server, rng)
                done.append(1)
                check_pages(server)

        done: list[int] = []
        per_client = times // 3
        threads = [threading.Thread(target=client, args=(n, per_client)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 3 * per_client
        until(lambda: (s := server.stats())["running"] + s["waiting"] == 0)
        pool = check_pages(server)
        assert pool["referenced"] == 0
        assert server.stats()["num_requests"] > times // 3
        answer = server.http.post(PATHS[0], json=body_of(PATHS[0], stream=False, max_tokens=3))
        assert answer.status_code == 200


def test_thirty_random_disconnects(tmp_path: Path) -> None:
    soak(tmp_path, 30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_random_disconnects(tmp_path: Path) -> None:
    soak(tmp_path, 1000)

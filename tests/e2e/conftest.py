"""The real server, as a user starts it: its own process, the real model, real sockets."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
READY = re.compile(r"ready on (http://\S+:\d+) ")


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; `http` talks to it."""

    url: str
    http: httpx.Client
    process: "subprocess.Popen[str]"

    def pool(self) -> dict[str, int]:
        """Pages by state and the engine's counters, when it has time for them."""
        while (answer := self.http.get("/admin/pool")).status_code == 503:
            pass
        counts: dict[str, int] = answer.raise_for_status().json()
        return counts

    def flush(self) -> None:
        """Forget everything cached."""
        self.http.post("/admin/cache/flush").raise_for_status()


@contextlib.contextmanager
def serve(
    *arguments: str, environment: dict[str, str] | None = None, port: int = 0
) -> Iterator[Server]:
    """`headwater serve` on a port that it finds, unless one is given, until the block ends; it
    must then end by itself with 0."""
    command = [sys.executable, "-m", "service", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if ready := READY.search(line):
            break
    else:
        process.stdout.close()
        process.wait(timeout=60)
        pytest.fail(f"the server did not start:\n{''.join(lines)}")
    # A server whose lines nobody reads stands still once the pipe is full.
    reading = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reading.start()
    url = ready[1]
    try:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            yield Server(url, http, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        reading.join()
        process.stdout.close()
    assert process.returncode == 0, "".join(lines)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for all tests of this folder; each test uses prompts of its own."""
    with serve() as running:
        yield running

"""A real server in a process of its own, whose engine process can be killed and stopped."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.scripted import ScriptFile
from tests.faults.control import ALL_TASKS, FOLDER_VARIABLE

ROOT = Path(__file__).parent.parent.parent
READY = re.compile(r"ready on (http://\S+:\d+) ")
ENDLESS = ScriptFile(delay_s=0.01)


@dataclass(slots=True)
class Ended:
    """How a server ended."""

    code: int
    log: str


@dataclass(slots=True)
class FaultyServer:
    """A server that runs; `folder` is where its faults are asked for. `ended` is filled at its
    end."""

    url: str
    port: int
    http: httpx.Client
    process: "subprocess.Popen[bytes]"
    folder: Path
    ended: list[Ended] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def engine_pid(self) -> int:
        """The engine's process."""
        return children(self.process.pid)[0]

    def stop_spare(self) -> int:
        """Stop the process that would be the next engine, so that none follows until it goes
        on."""
        until(lambda: len(children(self.process.pid)) == 2)
        spare = children(self.process.pid)[1]
        os.kill(spare, signal.SIGSTOP)
        return spare

    def signal_engine(self, number: int) -> int:
        pid = self.engine_pid()
        os.kill(pid, number)
        return pid

    def ready(self) -> dict[str, Any]:
        """What `/health/ready` says."""
        answer: dict[str, Any] = self.http.get("/health/ready").json()
        return answer

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/health").json()
        return answer

    def wait_running(self, number: int) -> None:
        """Until so many requests run."""
        until(lambda: self.stats()["running"] == number)

    def wait_restarts(self, number: int) -> None:
        """Until so many engines were started again, and the last one serves."""
        until(lambda: self.health()["num_restarts"] == number and self.ready()["ready"])

    def stats(self) -> dict[str, int]:
        """Counts of the engine, when it has time for them."""
        while (answer := self.http.get("/admin/pool")).status_code == 503:
            pass
        counts: dict[str, int] = answer.json()
        return counts

    def wait_end(self, timeout_s: float = 30) -> Ended:
        """Its end, which something else brings about. One that does not come in time is brought
        about, and the test fails with what the server's tasks and threads wait for."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server does not end:\n{self._last_words()}") from None
        return Ended(code, self.log)

    def _last_words(self) -> str:
        self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(AssertionError):  # its event loop may hang
            until(lambda: ALL_TASKS in self.log, 5)
        self.process.send_signal(signal.SIGABRT)
        self.process.wait()
        return self.log


def until(condition: Callable[[], bool], within_s: float = 30.0) -> float:
    """Wait for a condition; how long it took. The test fails after `within_s`."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < within_s, "it does not come to that"
        time.sleep(0.005)
    return time.monotonic() - begin_s


def children(pid: int) -> list[int]:
    """Processes that the main thread of `pid` has started and that have not ended."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    folder: Path, *arguments: str, script: ScriptFile | None = None, port: int = 0
) -> FaultyServer:
    """`serve` on a port that it finds, or a given one, with the real model or a script; returns
    when it is ready."""
    if script is not None:
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        arguments = (*arguments, "--script", str(folder / "script.json"))
    command = [sys.executable, "-m", "tests.faults.serve", "serve", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONFAULTHANDLER": "1",
                FOLDER_VARIABLE: str(folder),
            },
            stdout=log,
            stderr=log,
        )
    log_file = folder / "log"

    def url_of_log() -> str:
        assert process.poll() is None, log_file.read_text()
        found = READY.search(log_file.read_text())
        return found[1] if found else ""

    try:
        until(lambda: url_of_log() != "", 60)
    except AssertionError:
        process.kill()
        process.wait()
        raise
    url = url_of_log()
    http = httpx.Client(base_url=url, timeout=60, trust_env=False)
    return FaultyServer(url, int(url.rpartition(":")[2]), http, process, folder)


@contextlib.contextmanager
def serving(
    folder: Path, *arguments: str, script: ScriptFile | None = None
) -> Iterator[FaultyServer]:
    """`start` for a block. If it still runs then, it must end by itself with 0."""
    server = start(folder, *arguments, script=script)
    running = False
    try:
        with server.http:
            yield server
        running = server.process.poll() is None
    finally:
        server.process.send_signal(signal.SIGTERM)
        try:
            code = server.wait_end().code
        finally:
            server.process.kill()
    if running:
        assert code == 0, server.log
        assert "Traceback" not in server.log, server.log


def body_of(path: str, *, stream: bool, text: str = "hi", max_tokens: int = 0) -> dict[str, Any]:
    """A body for an endpoint, which generates until it is stopped, or to `max_tokens`."""
    message = [{"role": "user", "content": text}]
    limit = max_tokens or 4000
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": message, "max_tokens": limit, "ignore_eos": True},
        "/v1/completions": {"prompt": text, "max_tokens": limit, "ignore_eos": True},
        "/v1/messages": {"messages": message, "max_tokens": limit},
        "/v1/responses": {"input": text, "max_output_tokens": limit, "ignore_eos": True},
    }
    return {"model": "default", "stream": stream, **bodies[path]}


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_ENDS = {
    "/v1/messages": ("message_stop", "error"),
    "/v1/responses": (
        "response.completed",
        "response.failed",
        "response.incomplete",
        "error",
    ),
}


def ends_of(path: str, text: str) -> list[dict[str, Any]]:
    """The terminal events of a stream, as its dialect has them."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if path in _ENDS:
        events: list[dict[str, Any]] = [json.loads(frame) for frame in data]
        return [event for event in events if event["type"] in _ENDS[path]]
    ends = [{"done": True} if frame == "[DONE]" else json.loads(frame) for frame in data]
    return [end for end in ends if "done" in end or "error" in end]

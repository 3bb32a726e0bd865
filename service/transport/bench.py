"""What streaming costs the edge's process: CPU per token and transport, beside a bare server.

python -m service.transport.bench [--streams N] [--step-ms MS] [--steps N] [--rounds N]
    [--only TEXT]

Real clients, real sockets, and the engine's process behind its border, where a script takes the
place of the model: at every step each stream gets its next token. The bare server is uvicorn on
the same event loop, with an application that sends every stream a constant frame at every step.
CPU is utime and stime of the process that has the sockets, between two moments at which all
streams run: their sum to the nanosecond, and their shares by the kernel's ticks.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import math
import multiprocessing
import os
import re
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import Message, Receive, Scope, Send

_BEGUN: Final = 0.15
_NEARLY_DONE: Final = 0.95
"""Parts of all tokens: what comes before and after is not measured."""
_GROUP: Final = 4
"""Tokens a step brings to a stream where more than one does."""
_TEXT: Final = "the river remembers every stone it has passed and "
_MESSAGES: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Say something."}]}
_INPUT: Final[dict[str, Any]] = {"input": "Say something."}


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to stream. `frame` matches what each token's frame has of text."""

    name: str
    path: str
    body: dict[str, Any]
    frame: re.Pattern[bytes]
    on_socket: bool = False


_DELTA: Final = re.compile(rb'"delta":"([^"]*)"')
TRANSPORTS: Final = (
    Transport("chat SSE", "/v1/chat/completions", _MESSAGES, re.compile(rb'"content":"([^"]+)"')),
    Transport(
        "completions SSE", "/v1/completions", {"prompt": "Say"}, re.compile(rb'"text":"([^"]+)"')
    ),
    Transport("messages SSE", "/v1/messages", _MESSAGES, re.compile(rb'delta","text":"([^"]*)"')),
    Transport("responses SSE", "/v1/responses", _INPUT, _DELTA),
    Transport("responses WS", "/v1/responses", _INPUT, _DELTA, on_socket=True),
)
FLOORS: Final = (
    Transport("bare SSE", "/", {}, re.compile(rb"data: (x)")),
    Transport("bare WS", "/", {}, re.compile(rb"data: (x)"), on_socket=True),
)
_FLOOR_FRAME: Final = b"data: " + b"x" * 200 + b"\n\n"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU per token, the part of it that is the system's, and frames per token. The
    part is None where it all took less than a tick."""

    total_s: float
    system: float | None
    num_frames: float


class NothingMeasured(Exception):
    """All tokens came at once."""


class Client:
    """One stream's reader."""

    def __init__(self, port: int, transport: Transport, num_tokens: int) -> None:
        limit = "max_output_tokens" if transport.path == "/v1/responses" else "max_tokens"
        fields = {**transport.body, "model": "bench", limit: num_tokens}
        self._frame = transport.frame
        self._rest = b""
        self.num_tokens = 0
        self.num_frames = 0
        self.sock = socket.create_connection(("127.0.0.1", port), 30.0)
        if transport.on_socket:
            key = base64.b64encode(os.urandom(16)).decode()
            head = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: {key}\r\n"
            self._ask("GET", transport.path, f"{head}sec-websocket-version: 13\r\n", b"")
            self.sock.recv(4096)
            body = json.dumps({"type": "response.create", **fields}).encode()
            # A text frame (RFC 6455, 5.2), whose mask of zeros changes nothing.
            self.sock.sendall(struct.pack("!BBH4x", 0x81, 0xFE, len(body)) + body)
        else:
            body = json.dumps({**fields, "stream": True}).encode()
            self._ask("POST", transport.path, f"content-length: {len(body)}\r\n", body)

    def _ask(self, method: str, path: str, fields: str, body: bytes) -> None:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n"
        self.sock.sendall(head.encode() + body)

    def read(self) -> None:
        """Take what has come. Raises RuntimeError at the end of the connection."""
        piece = self.sock.recv(1 << 16)
        if not piece:
            raise RuntimeError("the server closed a stream")
        data, end = self._rest + piece, 0
        for match in self._frame.finditer(data):
            self.num_frames += 1
            self.num_tokens += len(match[1])
            end = match.end()
        self._rest = data[end:]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that listens."""

    port: int
    pid: int

    def cpu(self) -> tuple[float, int, int]:
        """So far: seconds, ticks of them all, ticks of the system's."""
        total_s = time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        user, system = int(fields[11]), int(fields[12])
        return total_s, user + system, system


def measure(server: Server, transport: Transport, num_streams: int, num_tokens: int) -> Cost:
    """Let so many clients stream at once, each so many tokens. Raises NothingMeasured."""
    clients = [Client(server.port, transport, num_tokens) for _ in range(num_streams)]
    due = [int(num_streams * num_tokens * part) for part in (_BEGUN, _NEARLY_DONE)]
    marks: list[tuple[int, int, float, int, int]] = []
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.sock, selectors.EVENT_READ, client)
        told = 0
        while len(marks) < len(due):
            if told < due[len(marks)]:
                for key, _ in selector.select():
                    key.data.read()
                told = sum(client.num_tokens for client in clients)
            else:
                frames = sum(client.num_frames for client in clients)
                marks.append((told, frames, *server.cpu()))
    for client in clients:
        client.sock.close()
    tokens, frames, total_s, ticks, system = (b - a for a, b in zip(*marks, strict=True))
    if not tokens:
        raise NothingMeasured
    return Cost(total_s / tokens, system / ticks if ticks else None, frames / tokens)


@contextlib.contextmanager
def serve_script(step_s: float, tokens_per_step: int) -> Iterator[Server]:
    """Headwater, with an engine that tells every stream so many tokens at each step."""
    script = {
        "text": _TEXT * tokens_per_step,
        "tokens_per_step": tokens_per_step,
        "delay_s": 0.0,
        "step_s": step_s,
        "model_name": "bench",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, _free_port() as port:
        json.dump(script, file)
        file.flush()
        command = [sys.executable, "-m", "service", "serve", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--script", file.name, "--log-level", "warning"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield Server(port, process.pid)
        finally:
            process.terminate()
            process.wait()


class Bare:
    """The floor: an application that sends a constant frame at every step, and does no more."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            asked = json.loads((await receive())["text"])
            message: Message = {"type": "websocket.send", "text": _FLOOR_FRAME.decode()}
        else:
            asked = json.loads((await receive())["body"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            message = {"type": "http.response.body", "body": _FLOOR_FRAME, "more_body": True}
        with contextlib.suppress(OSError):  # the client left
            for _ in range(asked["max_tokens"]):
                await self._step.wait()
                await send(message)

    async def _tick(self) -> None:
        due_s = asyncio.get_running_loop().time()
        while True:
            due_s += self._step_s
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            self._step.set()
            self._step = asyncio.Event()


def _run_bare(port: int, step_s: float) -> None:
    uvicorn.run(
        Bare(step_s),
        port=port,
        loop="uvloop",
        http="httptools",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_level="critical",
    )


@contextlib.contextmanager
def serve_bare(step_s: float) -> Iterator[Server]:
    """The floor, in a process of its own."""
    with _free_port() as port:
        process = multiprocessing.get_context("spawn").Process(
            target=_run_bare, args=(port, step_s)
        )
        process.start()
        assert process.pid is not None
        try:
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
            yield Server(port, process.pid)
        finally:
            process.kill()
            process.join()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    yield port


def _report(costs: dict[str, list[Cost]]) -> Iterator[str]:
    yield f"{'':28}{'CPU us':>8}{'user':>8}{'system':>8}{'of bare':>9}{'frames':>8}\n"
    for name, rounds in costs.items():
        total_s = statistics.median(each.total_s for each in rounds)
        parts = [each.system for each in rounds if each.system is not None]
        system = statistics.median(parts) if parts else math.nan
        floor = costs["bare WS" if " WS" in name else "bare SSE"]
        ratio = statistics.median(
            each.total_s / bare.total_s for each, bare in zip(rounds, floor, strict=True)
        )
        frames = statistics.median(each.num_frames for each in rounds)
        yield (
            f"{name:28}{total_s * 1e6:8.1f}{total_s * (1 - system) * 1e6:8.1f}"
            f"{total_s * system * 1e6:8.1f}{ratio:9.2f}{frames:8.2f}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m service.transport.bench")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="measure what has this in its name")
    args = parser.parse_args()
    step_s = args.step_ms / 1e3
    costs: dict[str, list[Cost]] = {}
    with (
        serve_bare(step_s) as bare,
        serve_script(step_s, 1) as one,
        serve_script(step_s, _GROUP) as group,
    ):
        runs = [(bare, each, each.name, 1) for each in FLOORS]
        wanted = [each for each in TRANSPORTS if args.only in each.name]
        runs += [(one, each, each.name, 1) for each in wanted]
        runs += [(group, each, f"{each.name}, {_GROUP} a step", _GROUP) for each in wanted]
        try:
            for _ in range(args.rounds):
                for server, transport, name, tokens in runs:
                    cost = measure(server, transport, args.streams, args.steps * tokens)
                    costs.setdefault(name, []).append(cost)
        except NothingMeasured:
            sys.exit("these are too few tokens to be measured: ask for more --steps")
    sys.stdout.write(f"Per token, at {args.streams} streams and a step each {args.step_ms} ms:\n")
    sys.stdout.writelines(_report(costs))


if __name__ == "__main__":
    main()

"""A server of the embedded model for one measurement, and single requests to it."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from loadtest.transports import Target

ROOT: Final = Path(__file__).parent.parent.parent.parent
START_S: Final = 120.0
SETTLE_S: Final = 1.5
"""After a server says that it is ready, its spare engine still reads its modules."""
MODEL: Final = "default"
NUM_SPECIAL: Final = 17
"""The model's first tokens have no text: each would be a gap of two steps between pieces."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    name: str
    url: str
    pid: int

    @property
    def target(self) -> Target:
        """What the transports need; answers have the length that is asked for, all of it text."""
        silent = {str(token_id): -100 for token_id in range(NUM_SPECIAL)}
        return Target(self.name, self.url, MODEL, {"ignore_eos": True, "logit_bias": silent})


@contextlib.asynccontextmanager
async def serving(name: str, *options: str) -> AsyncIterator[Server]:
    """A server with these options, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "service", "serve", "--port", str(port), *options]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    server = Server(name, f"http://127.0.0.1:{port}", process.pid)
    try:
        await _wait_ready(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _wait_ready(server: Server, process: asyncio.subprocess.Process) -> None:
    end_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < end_s and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{server.url}/health/ready") as answer:
                    if answer.status == 200:
                        await asyncio.sleep(SETTLE_S)
                        return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"{server.name} did not become ready: see `python -m service serve`")


@dataclass(slots=True)
class Asked:
    """A completion that was asked for; times in seconds of `time.perf_counter`, 0.0 for what did
    not happen. `retry_s` is what a refusal says."""

    sent_s: float
    status: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    retry_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """To the first piece of the answer."""
        return self.first_s - self.sent_s

    @property
    def good(self) -> bool:
        """It was answered."""
        return self.status == 200 and self.first_s > 0


def open_http() -> aiohttp.ClientSession:
    """No bound on connections, no compression, no timeouts."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"accept-encoding": "identity"},
    )


async def ask(http: aiohttp.ClientSession, server: Server, prompt: str, tokens: int) -> Asked:
    """A streamed completion of so many tokens."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    asked = Asked(time.perf_counter())
    try:
        async with http.post(f"{server.url}/v1/completions", json=body) as answer:
            asked.status = answer.status
            asked.retry_s = float(answer.headers.get("retry-after-ms", "0")) / 1e3
            before_s = 0.0
            async for _ in answer.content.iter_any():
                now_s = time.perf_counter()
                if answer.status == 200 and before_s:
                    asked.gaps_s.append(now_s - before_s)
                elif answer.status == 200:
                    asked.first_s = now_s
                before_s = now_s
    except aiohttp.ClientError:
        asked.status = -1
    asked.end_s = time.perf_counter()
    return asked

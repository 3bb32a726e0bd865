"""An engine in a process of its own."""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
from typing import Final

import msgspec

from engine.api import EngineError
from engine.overload import QueueBounds
from engine.transport.client import EngineClient, LastWords
from engine.types import EngineConfig
from engine.wire.frames import FrameSender
from engine.wire.messages import BEGIN, WIRE, Hello, encode

LOAD_LIMIT_S: Final = 120.0
"""How long an engine may load its model before it counts as hung."""
END_S: Final = 5.0
"""How long a killed process may take to end before nobody waits for it any more."""

_log = logging.getLogger(__name__)


class ProcessPeer:
    """The engine's process; its standard error is ours."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def reap(self, timeout_s: float) -> str:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return "the engine process was killed and has not ended"
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"


class SpareProcess:
    """`python -m engine` with its modules and the model's text in memory, which waits to become
    an engine. It ends when this process does, however that ends.

    `module` is another one that ends up in `engine.__main__`. Raises EngineError if the process
    cannot be started.
    """

    def __init__(self, config: EngineConfig, module: str = "engine") -> None:
        max_open = config.max_running + config.max_waiting
        if max_open < 1:
            raise EngineError("max_running and max_waiting leave no room for a request")
        self._bounds = QueueBounds(max_open, config.max_waiting_tokens, config.ttft_target_ms)
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs.fileno(), module)
            except OSError as error:
                self._socket.close()
                raise EngineError(f"the engine process cannot be started: {error}") from error
        FrameSender(self._socket).push(encode(Hello(WIRE, msgspec.Raw(encode(config)))))

    @property
    def alive(self) -> bool:
        """Whether it can still begin."""
        return self._process.poll() is None

    async def begin(self, last_words: LastWords, limit_s: float) -> EngineClient:
        """Let it load the model and wait until it is ready, at most so long. To be called once.
        Raises EngineError, with a sentence for the user, if it does not come to that; cancelled or
        failed, nothing stays running."""
        client = EngineClient(self._socket, ProcessPeer(self._process), self._bounds, last_words)
        await client.start(BEGIN, limit_s)
        return client

    def end(self) -> None:
        """End one that never began."""
        self._socket.close()
        self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            _log.error("a spare engine was killed and has not ended %g s later", END_S)


async def start_process_engine(
    config: EngineConfig,
    *,
    module: str = "engine",
    last_words: LastWords = str,
    limit_s: float = LOAD_LIMIT_S,
) -> EngineClient:
    """Start an engine process for `config` and wait until it is ready. See `SpareProcess`."""
    return await SpareProcess(config, module).begin(last_words, limit_s)


def _spawn(fd: int, module: str) -> "subprocess.Popen[bytes]":
    # -P: a folder named "engine" in the user's working directory is not ours.
    command = [sys.executable, "-P", "-m", module, "--fd", str(fd)]
    # A group of its own: a Ctrl-C is for the edge, which ends the engine when it is time.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,), process_group=0)

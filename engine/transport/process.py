"""An engine in a process of its own."""

import contextlib
import signal
import socket
import subprocess
import sys

from engine.api import EngineError
from engine.overload import QueueBounds
from engine.transport.client import EngineClient, LastWords
from engine.types import EngineConfig
from engine.wire.messages import encode


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
            code = self._process.wait()
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"


async def start_process_engine(
    config: EngineConfig, *, module: str = "engine", last_words: LastWords = str
) -> EngineClient:
    """Start `python -m engine` for `config` and wait until it is ready.

    The process ends when this one does, however it ends. `module` is another one that ends up in
    `engine.__main__`. Raises EngineError, with a sentence for the user, if the engine cannot start;
    cancelled or failed, nothing stays running.
    """
    max_open = config.max_running + config.max_waiting
    if max_open < 1:
        raise EngineError("max_running and max_waiting leave no room for a request")
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = _spawn(theirs.fileno(), module)
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine process cannot be started: {error}") from error
    bounds = QueueBounds(max_open, config.max_waiting_tokens, config.ttft_target_ms)
    client = EngineClient(ours, ProcessPeer(process), bounds, last_words)
    await client.start(encode(config))
    return client


def _spawn(fd: int, module: str) -> "subprocess.Popen[bytes]":
    # -P: a folder named "engine" in the user's working directory is not ours.
    command = [sys.executable, "-P", "-m", module, "--fd", str(fd)]
    # A group of its own: a Ctrl-C is for the edge, which ends the engine when it is time.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,), process_group=0)

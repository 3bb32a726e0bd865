"""The same engine in a thread, for tests: the same loop, messages and client over a socket."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from engine.api import EngineError
from engine.core import Core
from engine.loop import serve
from engine.overload import QueueBounds
from engine.transport.client import EngineClient, LastWords

_log = logging.getLogger(__name__)


class ThreadPeer:
    """The engine's thread, which only its loop can end: `kill` takes its socket away."""

    def __init__(self, sock: socket.socket, make_core: Callable[[], Core]) -> None:
        self._socket = sock
        self._make_core = make_core
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def reap(self, timeout_s: float) -> str:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.kill()
            return "the engine thread hangs"
        return "the engine thread ended"

    def _run(self) -> None:
        try:
            serve(self._socket, self._make_core)
        except Exception:
            _log.exception("the engine failed")


async def start_thread_engine(
    make_core: Callable[[], Core], *, max_open: int = 1088, last_words: LastWords = str
) -> EngineClient:
    """Start the core that `make_core` makes, called on the engine's thread.

    `max_open` bounds running and waiting requests. Raises EngineError, with a sentence for the
    user, if the core cannot be made.
    """
    if max_open < 1:
        raise EngineError("max_open leaves no room for a request")
    ours, theirs = socket.socketpair()
    bounds = QueueBounds(max_open, max_waiting_tokens=1 << 30)
    client = EngineClient(ours, ThreadPeer(theirs, make_core), bounds, last_words)
    await client.start()
    return client

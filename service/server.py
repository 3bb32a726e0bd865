"""The server's life: bind, serve, drain. uvicorn carries the bytes; what it may do is set here."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from engine.api import Engine
from service.app import App
from service.config import Settings
from service.transport.connections import Connections
from service.transport.protocol import EdgeProtocol
from service.transport.tls import TlsContext
from service.transport.websocket_protocol import EdgeWebSocket

BACKLOG = 2048
CLOSE_S = 5
"""How long connections may take to end once nothing runs for them any more; then they are cut."""
HURRY_S = 1.0
"""The same once a second signal has said that there is no time."""
LAST_S = 60.0
"""After the grace, all that has a bound of its own on the way out takes less; so long at most."""
LAST_HURRY_S = 30.0
"""The same after a second signal."""
ONE_SIGNAL_S = 0.5
"""Signals closer than this are one: wrappers pass on what the whole process group got anyway."""

log = logging.getLogger(__name__)


def _need_not_know(within_s: float) -> None:
    """An `on_stopping` for those who see to their end themselves."""


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is known before the model is loaded,
    and nobody is let in before the engine stands. Raises OSError."""
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Small, so that a slow reader is felt while it is slow.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, settings.limits.send_buffer_bytes)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


class Server:
    """Serves one app on one bound socket until it is told to stop."""

    def __init__(self, app: App, engine: Engine, settings: Settings) -> None:
        self._app = app
        self._engine = engine
        self._drain_s = settings.drain_s
        self.intake = app.intake
        self.connections = app.connections
        self._uvicorn = _Uvicorn(_config(app, settings, self.connections))
        self._signalled_s = -math.inf
        self._stopping: asyncio.Task[None] | None = None
        self._on_stopping: Callable[[float], None] = _need_not_know

    async def serve(
        self,
        sock: socket.socket,
        on_ready: Callable[[], None],
        on_stopping: Callable[[float], None] = _need_not_know,
    ) -> None:
        """Call `on_ready` when connections are taken; return when all has ended. The engine stays
        the caller's to close. `on_stopping` is told at each `stop` within how many seconds a sane
        process has ended. Raises OSError if the socket cannot listen."""
        self._on_stopping = on_stopping
        self._uvicorn.on_ready = on_ready
        await self._uvicorn.serve([sock])

    def handle_signals(self) -> None:
        """Let SIGINT and SIGTERM stop the server: the first drains, a second aborts what runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        now_s = time.monotonic()
        if now_s - self._signalled_s > ONE_SIGNAL_S:
            self.stop()
        self._signalled_s = now_s

    def stop(self) -> None:
        """Refuse new requests, let running ones end within the grace, then end. Called again,
        abort the running ones now: each still gets its terminal event."""
        if self._stopping is None:
            self._on_stopping(self._drain_s + LAST_S)
            log.info("draining: running requests have %.0f s to finish", self._drain_s)
            self._stopping = asyncio.get_running_loop().create_task(self._drain(self._drain_s))
        elif not self._uvicorn.should_exit:
            self._on_stopping(LAST_HURRY_S)
            log.info("aborting the running requests")
            self._stopping.cancel()
            self._stopping = asyncio.get_running_loop().create_task(self._drain(0.0, HURRY_S))

    async def _drain(self, grace_s: float, close_s: float = CLOSE_S) -> None:
        sockets = asyncio.get_running_loop().create_task(self._app.drain())
        try:
            await self._engine.drain(grace_s)
            # From here on clients have only to take what is written; some never will.
            asyncio.get_running_loop().call_later(close_s, self.connections.end)
            await asyncio.wait([sockets], timeout=2 * CLOSE_S)
        except Exception:
            log.exception("the drain failed: what runs is cut")
        finally:
            sockets.cancel()
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own ideas about signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.on_ready: Callable[[], None] = lambda: None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell."""
        await super().startup(sockets)
        self.on_ready()


def _config(app: App, settings: Settings, connections: Connections) -> uvicorn.Config:
    limits, certificate = settings.limits, settings.tls_cert
    # uvicorn calls what it is given with its own arguments; a class is all its types foresee.
    http: Any = partial(EdgeProtocol, limits=limits, open_connections=connections)
    websocket: Any = partial(
        EdgeWebSocket, limits=limits, open_connections=connections, intake=app.intake
    )
    return uvicorn.Config(
        app,
        http=http,
        ws=websocket,
        ws_max_size=limits.ws_frame_bytes,
        ws_max_queue=limits.ws_queue_frames,
        ws_ping_interval=limits.ws_ping_interval_s,
        ws_ping_timeout=limits.ws_ping_timeout_s,
        ws_per_message_deflate=False,
        interface="asgi3",
        lifespan="off",
        reset_contextvars=True,  # no request begins with what the one before it has set
        access_log=False,
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=2 * CLOSE_S,
        ssl_context_factory=None
        if certificate is None
        else lambda *_: TlsContext.of(certificate, settings.tls_key),
    )

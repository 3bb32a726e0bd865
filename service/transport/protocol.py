"""uvicorn's HTTP protocol as this server needs it: strict, bounded in bytes and in time, and true
to one answer at a time, also for clients that pipeline or close only their sending side."""

import asyncio
import urllib.parse
from typing import Any, Final, Literal, cast

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from service.config import Limits
from service.errors import ApiError, openai_error, overloaded
from service.transport.connections import Connections, WatchedTransport
from service.transport.http import HALF_CLOSE
from service.transport.tls import is_plain

PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
PROBE_PAUSE_S: Final = 0.02
LINGER_S: Final = 5.0
"""How long the rest of a body is still taken after its answer: a client that writes into a closed
connection may lose the answer to a reset."""
PIPELINED_BYTES: Final = 64 << 10
"""What may follow a request before its answer has ended; for more the connection is closed after
that answer, and the client has to ask again (RFC 9112, 9.3.2)."""

SPEAKS_TLS: Final = "This port speaks TLS: use https://, or wss:// for WebSockets."

Awaited = Literal["head", "next request", "rest of a body"]


class Refused(Exception):
    """A message that is no request this server takes; raised out of the parser's callbacks."""

    def __init__(self, status: int, message: str, code: str = "invalid_http") -> None:
        super().__init__(message)
        self.error = ApiError(status, message, code=code)


class _OldCycle(RequestResponseCycle):
    """An HTTP/1.0 client's request, whose answer ends with the connection."""

    async def send(self, message: ASGISendEvent) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class EdgeProtocol(HttpToolsProtocol):
    """One connection's requests, answered one after the other.

    A half-close and a close look the same until something is written: a closed peer answers the
    first write with a reset, which the second one meets. Before an answer begins, two interim
    responses are those writes (RFC 9110, 15.2: a client skips them). Afterwards the answer's own
    writes are; the scope's extension `HALF_CLOSE` holds an asyncio.Event that is set at
    half-close, for those who would else be silent.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
        open_connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.half_closed = asyncio.Event()
        self._limits = limits
        self._open_connections = open_connections
        self._watched: WatchedTransport
        self._running: RequestResponseCycle | None = None
        self._in_head = False
        self._in_body = False
        self._num_head_bytes = 0  # as they came
        self._num_field_bytes = 0  # as they were parsed
        self._num_pipelined_bytes = 0
        self._deaf = False
        self._awaited: Awaited | None = None
        self._timer: asyncio.TimerHandle | None = None

    # What happens to the connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Watch it; one too many is told so and closed."""
        full = self._open_connections.full
        self._watched = self._open_connections.add(transport, self.loop)
        super().connection_made(self._watched)
        if full:
            self._refuse(_too_many())
        elif is_plain(transport):
            self._refuse(ApiError(400, SPEAKS_TLS, code="tls_required"))
        else:
            self._await("head", self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of every request that came over it."""
        self._open_connections.remove(self._watched)
        self._await(None)
        running = [] if self._running is None else [self._running]
        for cycle in (*running, *(cycle for cycle, _ in self.pipeline)):
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the transport while a whole request waits for its answer."""
        running = self._answering()
        if running is None or running.more_body or self.scheme == "https":
            return None  # TLS has no half-close
        if running.scope["http_version"] != "1.1" and not running.response_started:
            return None  # an HTTP/1.0 client knows no interim responses
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else running
        last.keep_alive = False
        self.half_closed.set()
        self._probe()
        self.loop.call_later(PROBE_PAUSE_S, self._probe)
        return True

    def _probe(self) -> None:
        running = self._answering()
        waits = running is not None and not running.response_started
        if waits and not self.transport.is_closing():
            self.transport.write(PROBE)

    def shutdown(self) -> None:
        """Called by uvicorn: end after what is answered now."""
        running = self._answering()
        if running is None:
            self.transport.close()
        else:
            running.keep_alive = False

    def data_received(self, data: bytes) -> None:
        """Feed the parser, whose callbacks start requests."""
        if self._deaf:
            return
        try:
            self._take(data)
        except Refused as refusal:
            self._refuse(refusal.error)
        except httptools.HttpParserCallbackError as failure:
            if not isinstance(failure.__context__, Refused):
                raise
            self._refuse(failure.__context__.error)
        except httptools.HttpParserError as error:
            self._refuse(Refused(400, f"This is not valid HTTP: {error}.").error)
        else:
            self._await_next()

    def _take(self, data: bytes) -> None:
        running = self._answering()
        if running is not None and not running.more_body:
            self._num_pipelined_bytes += len(data)
            if self._num_pipelined_bytes > PIPELINED_BYTES:
                self._stop_listening(running)
                return
        if self._in_head:
            self._num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        if self._in_head and self._num_head_bytes > self._limits.header_bytes:
            raise _head_too_large()

    def _upgrade(self, rest: bytes) -> None:
        """Go over to WebSocket; any other upgrade may be ignored (RFC 9110, 7.8): the request is
        parsed again without it, as the parser would take what follows for the other protocol."""
        method = self.scope["method"]
        if method == "CONNECT":
            raise Refused(501, "CONNECT is not supported.")
        if self._should_upgrade():
            if self._answering() is not None:
                raise Refused(400, "An upgrade cannot be pipelined.")
            self._await(None)
            self._deaf = True
            self.handle_websocket_upgrade()
            return
        head = [f"{method} ".encode(), self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"".join((*head, b"\r\n")))
        self.parser.feed_data(rest)

    # What the parser finds.

    def on_message_begin(self) -> None:
        """A request begins; its scope gets the extension."""
        super().on_message_begin()
        self._in_head = True
        self._num_head_bytes = self._num_field_bytes = 0
        extensions: dict[str, Any] = {HALF_CLOSE: {"event": self.half_closed}}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        super().on_url(url)
        if len(self.url) > self._limits.header_bytes:
            raise _head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field."""
        super().on_header(name, value)
        self._num_field_bytes += len(name) + len(value)
        limits = self._limits
        if len(self.headers) > limits.header_fields or self._num_field_bytes > limits.header_bytes:
            raise _head_too_large()

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait for the one that is being answered."""
        self._in_head = False
        self.scope["method"] = self.parser.get_method().decode("ascii")
        if self.parser.should_upgrade():
            return
        self._in_body = True
        version = self.parser.get_http_version()
        _check_framing(version, self.headers)
        self.scope["http_version"] = version
        self._set_target()
        cycle = _OldCycle if version == "1.0" else RequestResponseCycle
        self.cycle = cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        app = cast(Any, self.app)
        if self._answering() is None:
            self._running = self.cycle
            self._start_asgi_task(self.cycle, app)
        else:
            self.pipeline.appendleft((self.cycle, app))

    def on_body(self, body: bytes) -> None:
        """A piece of a body; what comes after the answer is dropped."""
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Start the next request, or wait for one."""
        self.server_state.total_requests += 1
        self._num_pipelined_bytes = 0
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._running = cycle
            self._start_asgi_task(cycle, app)
        self._await_next()

    def _set_target(self) -> None:
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            raise Refused(400, "The request's target is not valid.") from None
        raw_path = target.path or b"/"
        path = raw_path.decode("ascii", "replace")
        if "%" in path:
            path = urllib.parse.unquote(path)
        self.scope["path"] = self.root_path + path
        self.scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        self.scope["query_string"] = target.query or b""

    # What is waited for, and what is refused.

    def _answering(self) -> RequestResponseCycle | None:
        """The request whose answer has not ended."""
        running = self._running
        return None if running is None or running.response_complete else running

    def _await_next(self) -> None:
        """Time what the client owes. A body that is read is timed by who reads it."""
        if self.transport.is_closing() or self._deaf or self._answering() is not None:
            self._await(None)
        elif self._in_body:
            self._await("rest of a body", LINGER_S)
        elif self._in_head or self._running is None:
            self._await("head", self._limits.header_s)
        else:
            self._await("next request", self._limits.idle_s)

    def _await(self, awaited: Awaited | None, within_s: float = 0.0) -> None:
        """Time one thing; the time of what is awaited already goes on."""
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = awaited
        if awaited is not None:
            self._timer = self.loop.call_later(within_s, self._on_late)

    def _on_late(self) -> None:
        self._timer = None
        if self._in_head:
            message = "The request's header did not arrive in time."
            self._refuse(ApiError(408, message, code="timeout"))
        else:
            self.transport.close()

    def _stop_listening(self, running: RequestResponseCycle) -> None:
        """Nothing after the request that is answered now will be."""
        self._deaf = True
        self.pipeline.clear()
        running.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be a request and close; an answer that runs ends first."""
        self._await(None)
        running = self._answering()
        if running is not None and not running.more_body:
            self._stop_listening(running)
            return
        self._deaf = True
        if running is not None:
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.abort()
                return
        body = openai_error(error)
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.transport.close()


def _check_framing(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Raises Refused for what llhttp lets pass and this server does not speak."""
    if version not in ("1.0", "1.1"):
        raise Refused(505, "This server speaks HTTP/1.1.")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        raise Refused(400, "HTTP/1.0 has no Transfer-Encoding.")
    if codings and codings[0].lower() != b"chunked":
        raise Refused(501, "The only Transfer-Encoding that is supported is chunked.")


def _head_too_large() -> Refused:
    return Refused(431, "The request's header is too large.", "header_too_large")


def _too_many() -> ApiError:
    return overloaded("The server has as many connections as it may.")

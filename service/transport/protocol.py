"""uvicorn's HTTP protocol, made to keep serving a client that has closed only its sending side."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.transport.http import HALF_CLOSE

PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
PROBE_PAUSE_S = 0.02


class HalfCloseProtocol(HttpToolsProtocol):
    """Tells a half-close from a close, which look the same until something is written: a closed
    peer answers the first write with a reset, which the second one meets.

    Before the answer begins, two interim responses are those writes (RFC 9110, 15.2: a client
    skips them). Afterwards the answer's own writes are; the scope's extension `HALF_CLOSE` holds
    an asyncio.Event that is set at half-close, for those who would else be silent.
    """

    def on_message_begin(self) -> None:
        """A request begins; its scope gets the extension."""
        super().on_message_begin()
        self.half_closed = asyncio.Event()
        extensions: dict[str, Any] = {HALF_CLOSE: {"event": self.half_closed}}
        self.scope["extensions"] = extensions

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the transport while a whole request waits for its answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        if self.scope["http_version"] != "1.1" and not cycle.response_started:
            return None  # an HTTP/1.0 client knows no interim responses
        cycle.keep_alive = False
        self.half_closed.set()
        self._probe()
        self.loop.call_later(PROBE_PAUSE_S, self._probe)
        return True

    def _probe(self) -> None:
        if not self.transport.is_closing() and not self.cycle.response_started:
            self.transport.write(PROBE)

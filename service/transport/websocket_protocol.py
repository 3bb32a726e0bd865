"""uvicorn's WebSocket protocol as this server needs it: bounded in unread and unsent bytes."""

import asyncio
from collections import deque
from typing import Any, Final

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode
from websockets.protocol import State

from service.config import Limits
from service.errors import ApiError
from service.transport.connections import Connections, WatchedTransport
from service.transport.frames import BoundedFrames, frame_head
from service.transport.intake import Hold, Intake

POLICY: Final = CloseCode.POLICY_VIOLATION


class EdgeWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket, on a transport that `EdgeProtocol` had before and registered.

    Messages are held against the intake from their first byte until the application takes them; it
    may refuse one that is whole, and only where there is no room to read it the socket is closed.
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
        intake: Intake,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = BoundedFrames(max_size=config.ws_max_size, logger=self.conn.logger)
        self._limits = limits
        self._open_connections = open_connections
        self._hold = Hold(intake, reserve=True)
        self._unread: deque[int] = deque()
        self._late: asyncio.TimerHandle | None = None
        self._owed_pong = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is held any more."""
        if isinstance(self.transport, WatchedTransport):
            self._open_connections.remove(self.transport)
        self._time_message(False)
        self._hold.release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, within the bounds."""
        super().data_received(data)
        unfinished = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        if not self.handshake_complete or self.close_sent or self.disconnected:
            return
        self._time_message(unfinished > 0)
        try:
            self._hold.set(unfinished + sum(self._unread))
        except ApiError as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.message)

    def send_receive_event_to_app(self) -> None:
        """A message is whole."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = [data]
        if self.curr_msg_data_type == "text":
            try:
                data.decode()
            except UnicodeDecodeError:
                self.frames = []
                self._fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
                return
        if not self.close_sent:
            self._unread.append(len(data))
        super().send_receive_event_to_app()

    async def receive(self) -> ASGIReceiveEvent:
        """What comes next; who takes a message holds it from there on."""
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._hold.set(max(0, self._hold.num_bytes - self._unread.popleft()))
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """What the application says; a refusal ends the handshake as an answer does, where uvicorn
        would log that there was none. Raises OSError for a message after the end."""
        if message["type"] == "websocket.send":
            await self._send_text(str(message["text"]))
            return
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent

    async def _send_text(self, text: str) -> None:
        """A message in one frame (RFC 6455, 5.2), as every token is; others are the library's."""
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        data = text.encode()
        self.transport.write(frame_head(len(data)) + data)

    def handle_ping(self) -> None:
        """Answer, or if the client reads nothing, owe it the answer to its latest ping."""
        pongs = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(pongs))
        elif pongs:
            self._owed_pong = pongs[-1]

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._owed_pong:
            self.transport.write(self._owed_pong)
            self._owed_pong = b""
        super().resume_writing()

    def _time_message(self, begun: bool) -> None:
        """Close when a message that has begun does not end in time."""
        if begun and self._late is None:
            reason = "a message did not arrive in time"
            self._late = self.loop.call_later(self._limits.body_s, self._fail, POLICY, reason)
        elif not begun and self._late is not None:
            self._late.cancel()
            self._late = None

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._time_message(False)
        if self.close_sent or self.transport.is_closing():
            return
        self.conn.fail(code, reason)
        self.handle_parser_exception()

"""A client of bare sockets, for what HTTP libraries do not do: half-close, vanish, dawdle."""

import base64
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.service.calls import CHAT
from tests.service.conftest import LiveServer


def chat_request(body: dict[str, Any], *, version: str = "1.1") -> bytes:
    """The bytes of a chat call."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextmanager
def connected(server: LiveServer, *, receive_buffer: int = 0) -> Iterator[socket.socket]:
    """A socket to the server."""
    with socket.socket() as sock:
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def read_to_end(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    pieces = []
    while piece := sock.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def read_until(sock: socket.socket, mark: bytes, count: int = 1) -> bytes:
    """What comes until `mark` was seen `count` times."""
    data = b""
    while data.count(mark) < count:
        piece = sock.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def unchunked(data: bytes) -> bytes:
    """The body of an HTTP/1.1 answer with chunked encoding, interim answers skipped."""
    head, _, rest = data.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):
        head, _, rest = rest.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower(), head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


def open_websocket(sock: socket.socket) -> None:
    """Shake hands at the Responses endpoint."""
    key = base64.b64encode(bytes(16)).decode()
    sock.sendall(
        "GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\n"
        "upgrade: websocket\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: {key}\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1)
    assert head.startswith(b"HTTP/1.1 101"), head


def masked_frame(payload: bytes, *, opcode: int = 1, fin: bool = True) -> bytes:
    """A client's WebSocket frame; its mask is zero, so the payload stands as it is."""
    head = bytes([fin << 7 | opcode])
    if len(payload) < 126:
        head += bytes([0x80 | len(payload)])
    elif len(payload) < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack("!H", len(payload))
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", len(payload))
    return head + bytes(4) + payload

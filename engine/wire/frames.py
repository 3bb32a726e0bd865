"""Frames on a stream socket: a 4-byte big-endian length, then the payload."""

import socket
from collections.abc import Iterator

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A longer frame is a damaged stream: no request and no step comes near it."""

_HEADER_BYTES = 4
_SEND_BYTES = 1024 * 1024
_RECV_BYTES = 256 * 1024


class FrameError(Exception):
    """The byte stream is not one of frames; nothing after it can be trusted."""


class FrameReader:
    """Cuts a byte stream into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._received = memoryview(bytearray(_RECV_BYTES))

    def receive(self, sock: socket.socket) -> Iterator[bytes] | None:
        """Read once without blocking: the payloads that this completes, as `feed`; None where the
        stream has ended. Raises OSError, BlockingIOError where nothing has come."""
        # Into memory that is kept: as much of its own for each read would be mapped and unmapped.
        count = sock.recv_into(self._received, 0, socket.MSG_DONTWAIT)
        return self.feed(self._received[:count]) if count else None

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The payloads that `data` completes, in order; they are all to be taken. Raises
        FrameError after the last good one if an oversized one follows."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER_BYTES:
            length = int.from_bytes(buffer[:_HEADER_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise FrameError(
                    f"a frame of {length} bytes: at most {MAX_FRAME_BYTES} are allowed"
                )
            end = _HEADER_BYTES + length
            if len(buffer) < end:
                return
            payload = bytes(buffer[_HEADER_BYTES:end])
            del buffer[:end]
            yield payload


class FrameSender:
    """Writes frames without ever blocking: what the socket does not take now waits in a buffer.

    A peer that is gone swallows everything: its end is noticed by whoever reads the socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes waiting for the socket to take them."""
        return len(self._buffer)

    def push(self, payload: bytes) -> None:
        """Append a frame and send what the socket takes. Raises FrameError on an oversized one,
        with nothing appended."""
        if len(payload) > MAX_FRAME_BYTES:
            raise FrameError(f"a message of {len(payload)} bytes: at most {MAX_FRAME_BYTES}")
        self._buffer += len(payload).to_bytes(_HEADER_BYTES, "big")
        self._buffer += payload
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._buffer:
            try:
                with memoryview(self._buffer)[:_SEND_BYTES] as part:
                    num_sent = self._socket.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._buffer.clear()
                return
            del self._buffer[:num_sent]

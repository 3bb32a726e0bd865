"""WebSocket frames: how those begin that the server sends, and how many small ones a client may
send, as each costs the event loop as much as a large one, and a megabyte holds half a million."""

import struct
import time
from typing import Final

from websockets.exceptions import ProtocolError
from websockets.frames import Frame
from websockets.server import ServerProtocol

SMALL_BYTES: Final = 128
MAX_SMALL_FRAMES: Final = 2000
"""In each period; pings, pongs and pieces of messages alike."""
PERIOD_S: Final = 1.0

_TEXT: Final = 0x81
"""A text message's first and last frame."""


def frame_head(num_bytes: int) -> bytes:
    """What stands before the text of a message that is one unmasked frame (RFC 6455, 5.2)."""
    if num_bytes < 126:
        return struct.pack("!BB", _TEXT, num_bytes)
    if num_bytes < 1 << 16:
        return struct.pack("!BBH", _TEXT, 126, num_bytes)
    return struct.pack("!BBQ", _TEXT, 127, num_bytes)


class BoundedFrames(ServerProtocol):
    """A server's side of one connection that ends it (1002) at one small frame too many."""

    _num_small = 0
    _since_s = 0.0

    def recv_frame(self, frame: Frame) -> None:
        """Raises ProtocolError, which the parser turns into the end of the connection."""
        if len(frame.data) < SMALL_BYTES:
            self._num_small += 1
            if self._num_small > MAX_SMALL_FRAMES:
                now_s = time.monotonic()
                if now_s - self._since_s < PERIOD_S:
                    raise ProtocolError("too many small frames")
                self._since_s = now_s
                self._num_small = 1
        super().recv_frame(frame)

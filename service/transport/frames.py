"""How many small WebSocket frames a client may send: each costs the event loop as much as a large
one, and a megabyte holds half a million."""

import time
from typing import Final

from websockets.exceptions import ProtocolError
from websockets.frames import Frame
from websockets.server import ServerProtocol

SMALL_BYTES: Final = 128
MAX_SMALL_FRAMES: Final = 2000
"""In each period; pings, pongs and pieces of messages alike."""
PERIOD_S: Final = 1.0


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

"""The heads of our WebSocket frames are those of the library that reads them."""

import pytest
from websockets.frames import Frame, Opcode

from service.transport.frames import frame_head


@pytest.mark.parametrize("num_bytes", [0, 1, 125, 126, 65535, 65536, 1 << 20])
def test_a_frame_is_the_librarys(num_bytes: int) -> None:
    text = b"x" * num_bytes
    assert frame_head(num_bytes) + text == Frame(Opcode.TEXT, text).serialize(mask=False)

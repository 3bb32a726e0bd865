"""How a WebSocket begins, or does not."""

from typing import Final

from starlette.responses import Response
from starlette.websockets import WebSocket

from service.access.credentials import KEY_PROTOCOL
from service.dialects import wire
from service.errors import ApiError

SERVICE_RESTART: Final = 1012
"""The code a socket is closed with when its server drains."""


def accepted_protocol(offered: list[str]) -> str | None:
    """The first subprotocol that is no key: browsers end a handshake that accepts none of theirs,
    and a key is not said back."""
    return next((name for name in offered if not name.startswith(KEY_PROTOCOL)), None)


async def deny(websocket: WebSocket, error: ApiError) -> None:
    """Refuse the handshake with an ordinary HTTP answer."""
    response = Response(
        wire.encode_error(error), error.status, error.headers, media_type="application/json"
    )
    await websocket.send_denial_response(response)

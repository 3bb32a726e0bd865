"""How a WebSocket begins, or does not."""

from typing import Final

from starlette.types import Send

from service.access.credentials import KEY_PROTOCOL
from service.errors import ApiError, openai_error

SERVICE_RESTART: Final = 1012
"""The code a socket is closed with when its server drains."""


def accepted_protocol(offered: list[str]) -> str | None:
    """The first subprotocol that is no key: browsers end a handshake that accepts none of theirs,
    and a key is not said back."""
    return next((name for name in offered if not name.startswith(KEY_PROTOCOL)), None)


async def deny(send: Send, error: ApiError) -> None:
    """Refuse the handshake with an ordinary HTTP answer."""
    fields = {"content-type": "application/json", **(error.headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": raw})
    await send({"type": "websocket.http.response.body", "body": openai_error(error)})

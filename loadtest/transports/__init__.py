"""The ways to talk to a server, by the name that the command line gives them."""

from collections.abc import Callable

from loadtest.transports.base import Dialogue, Target, Transport
from loadtest.transports.chat import ChatJson, ChatSse
from loadtest.transports.messages import Messages
from loadtest.transports.responses import ResponsesSse
from loadtest.transports.websocket import ResponsesWebSocket

__all__ = ["NAMES", "Dialogue", "Target", "Transport", "open_transport"]

_TRANSPORTS: dict[str, Callable[[Target], Transport]] = {
    "chat-sse": ChatSse,
    "chat-json": ChatJson,
    "responses-sse": ResponsesSse,
    "responses-ws": ResponsesWebSocket,
    "messages": Messages,
}
NAMES = tuple(_TRANSPORTS)


def open_transport(name: str, target: Target) -> Transport:
    """The transport of that name (one of NAMES), in a running event loop; close it."""
    return _TRANSPORTS[name](target)

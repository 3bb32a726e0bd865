"""How a connection is refused before any endpoint has seen it."""

from starlette.types import Scope, Send

from service.errors import ApiError, openai_error


async def refuse(error: ApiError, scope: Scope, send: Send) -> None:
    """Raises `error` for HTTP, where the app's border answers it in the client's dialect; a
    WebSocket handshake is denied with it, or closed with 1008 where the server cannot deny."""
    if scope["type"] == "http":
        raise error
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})
        return
    fields = {"content-type": "application/json", **error.headers}
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send(
        {"type": "websocket.http.response.start", "status": error.status, "headers": headers}
    )
    await send({"type": "websocket.http.response.body", "body": openai_error(error)})

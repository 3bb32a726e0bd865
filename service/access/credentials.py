"""Whose request it is: the tenant of the key it shows, from then on in `scope["state"]["tenant"]`.

Keys come as `Authorization: Bearer`, or as `x-api-key` from Anthropic's clients. A web page cannot
send headers with a WebSocket handshake: it offers a subprotocol with the key in its name, as
OpenAI's realtime API has it, beside one that is accepted. Health stays open, as orchestrators have
no keys, and so do the dashboard's files, which show nothing by themselves, and the way to them;
what the operator alone may see needs an admin key.
"""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.types import SHARED_TENANT
from service.access.keys import KeyFile
from service.access.refusal import refuse
from service.errors import ApiError

OPEN: Final = ("/", "/health", "/dashboard")
ADMIN: Final = ("/admin", "/metrics", "/v1/roofline")
KEY_PROTOCOL: Final = "openai-insecure-api-key."


class CredentialMiddleware:
    """Refuses connections without a good key, where the server has keys."""

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                scope["state"]["tenant"] = self._tenant(scope)
            except ApiError as error:
                await refuse(error, scope, send)
                return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        if _is_under(scope["path"], OPEN):
            return SHARED_TENANT
        key = _key(Headers(scope=scope)) or _offered_key(scope)
        if not key:
            raise _unauthorized(
                "This server needs an API key: send 'Authorization: Bearer KEY' or 'x-api-key'."
            )
        credential = self._keys.find(key)
        if credential is None:
            raise _unauthorized("Incorrect API key provided.")
        if _is_under(scope["path"], ADMIN) and not credential.admin:
            raise ApiError(
                403, "This route is the operator's: it needs an admin key.", code="admin_only"
            )
        return credential.tenant


def _key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _offered_key(scope: Scope) -> str:
    offered: list[str] = scope.get("subprotocols", [])
    keys = [name.removeprefix(KEY_PROTOCOL) for name in offered if name.startswith(KEY_PROTOCOL)]
    return keys[0] if keys else ""


def _is_under(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or (root != "/" and path.startswith(f"{root}/")) for root in roots)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

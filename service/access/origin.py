"""Where a connection comes from: Host and Origin, before anything else is looked at.

A web page that rebinds its own name to this machine arrives with that name as Host; a page of
another site arrives with its Origin. Neither may reach a server that trusts the machine it runs
on. Names are what rebinding needs, so an IP address as Host is always in order.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.access.refusal import refuse
from service.config import Settings
from service.errors import ApiError

ANY = "*"


class OriginMiddleware:
    """Refuses connections, WebSocket handshakes included, by their Host and Origin."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        names = {"localhost", settings.host, *settings.allowed_hosts}
        self._hosts = frozenset(name.lower() for name in names)
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            refusal = self._refusal(Headers(scope=scope), scope["http_version"])
            if refusal is not None:
                await refuse(refusal, scope, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, version: str) -> ApiError | None:
        hosts = headers.getlist("host")
        if not hosts and version == "1.1":
            return ApiError(400, "An HTTP/1.1 request needs a Host header.", code="host_missing")
        if len(hosts) > 1 or not self._host_allowed(hosts[0] if hosts else ""):
            return ApiError(
                403,
                "The Host header names a host this server does not answer for; "
                "allow it with --allowed-host.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._origin_allowed(origin, hosts[0] if hosts else ""):
            return ApiError(
                403,
                "Web pages of this origin may not use this server; allow it with --allowed-origin.",
                code="origin_not_allowed",
            )
        return None

    def _host_allowed(self, host: str) -> bool:
        if ANY in self._hosts or not host:
            return True  # HTTP/1.0 clients send none; browsers always do
        name = _host_name(host)
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)

    def _origin_allowed(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if ANY in self._origins or origin in self._origins:
            return True
        try:
            return bool(host) and urlsplit(origin).netloc == host.lower()
        except ValueError:
            return False


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True

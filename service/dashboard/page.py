"""The static files of the page. They hold nothing of any user, so they need no key."""

from pathlib import Path
from typing import Final

from starlette.types import Receive, Scope, Send

from service.errors import ApiError
from service.transport.http import send_answer

_STATIC: Final = Path(__file__).parent / "static"
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class DashboardPage:
    """`GET /dashboard`, and `/dashboard/{name}` for what the page is made of. The files are read
    once."""

    def __init__(self) -> None:
        self._files = {
            path.name: (path.read_bytes(), _TYPES[path.suffix])
            for path in _STATIC.iterdir()
            if path.suffix in _TYPES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 404 for names that the page does not have."""
        name = scope["path_params"].get("name", _INDEX)
        if name not in self._files:
            raise ApiError(404, f"The dashboard has no {name!r}.", code="unknown_url")
        content, content_type = self._files[name]
        await send_answer(send, 200, content, _HEADERS, content_type)

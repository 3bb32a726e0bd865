"""`create_app`: routes, and the border at which every failure becomes an answer."""

import logging
import re
import secrets
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access import AccessMiddleware
from service.admin import Flush, Health, Pool, Ready
from service.catalog import Model, Models
from service.chat import ChatCompletions
from service.config import Settings
from service.errors import ApiError
from service.services import Services
from service.tokens import Detokenize, Tokenize
from service.transport.http import ClientGone, send_error
from service.transport.websocket import ResponsesSockets

_REQUEST_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

log = logging.getLogger(__name__)


def create_app(services: Services) -> "App":
    """The edge as one ASGI application: HTTP and WebSocket, no lifespan of its own."""
    sockets = ResponsesSockets(services)
    routes = Router(_routes(services, sockets), redirect_slashes=False)
    return App(_guarded(routes, services.settings), sockets)


def _guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id",),
        )
    return AccessMiddleware(app, settings)


def _routes(services: Services, sockets: ResponsesSockets) -> list[BaseRoute]:
    engine, card = services.engine, services.card
    return [
        Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
        WebSocketRoute("/v1/responses", sockets.endpoint),
        Route("/v1/responses", UpgradeRequired(), methods=["GET"]),
        Route("/v1/models", Models(card), methods=["GET"]),
        Route("/v1/models/{model:path}", Model(card), methods=["GET"]),
        Route("/tokenize", Tokenize(services), methods=["POST"]),
        Route("/detokenize", Detokenize(services), methods=["POST"]),
        Route("/health", Health(engine), methods=["GET"]),
        Route("/health/ready", Ready(engine), methods=["GET"]),
        Route("/admin/pool", Pool(engine), methods=["GET"]),
        Route("/admin/cache/flush", Flush(engine), methods=["POST"]),
    ]


class UpgradeRequired:
    """`GET /v1/responses` without the upgrade that makes it a WebSocket."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(
            426,
            "/v1/responses is a WebSocket endpoint here: connect with an Upgrade header.",
            code="upgrade_required",
            headers={"upgrade": "websocket", "connection": "upgrade"},
        )


class App:
    """The outermost layer: gives each request its id, and turns what is raised into answers.

    The id is the client's `x-request-id` where that is sane, and is echoed. Endpoints find it as
    `scope["state"]["request_id"]`.
    """

    def __init__(self, app: ASGIApp, sockets: ResponsesSockets) -> None:
        self._app = app
        self._sockets = sockets

    async def drain(self) -> None:
        """Refuse new work on WebSockets and return when all of them are closed, each after its
        running turns. HTTP requests end with what the engine's own drain makes of them."""
        await self._sockets.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        scope["app"] = self  # so that the router raises its 404 and 405 instead of answering them
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            log.info("request %s: the client left", request_id)
        except Exception as error:
            answer = _answer_for(error, scope, request_id)
            if not started:
                await send_error(send_with_id, answer)


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req_{secrets.token_hex(16)}"


def _answer_for(error: Exception, scope: Scope, request_id: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return _routing_error(error, scope)
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500, f"The server failed; its log has the cause under {request_id}.", type="server_error"
    )


def _routing_error(error: HTTPException, scope: Scope) -> ApiError:
    where = f"{scope['method']} {scope['path']}"
    if error.status_code == 404:
        return ApiError(404, f"Unknown URL: {where}.", code="unknown_url")
    if error.status_code == 405:
        return ApiError(
            405,
            f"{where} is not allowed; the Allow header says what is.",
            code="method_not_allowed",
            headers=error.headers,
        )
    return ApiError(error.status_code, str(error.detail))

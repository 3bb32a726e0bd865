"""`create_app`: routes, and the border at which every failure becomes an answer."""

import logging
import re
import secrets
from typing import Final, Protocol

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.types import SHARED_TENANT
from service.access.credentials import CredentialMiddleware
from service.access.origin import OriginMiddleware
from service.access.refusal import refuse
from service.dashboard.feed import FeedSocket
from service.dashboard.node import TreeNode
from service.dashboard.page import DashboardPage
from service.dialects.messages_errors import encode_error, error_status
from service.endpoints.admin import Flush, Health, Pool, Ready
from service.endpoints.cache import Explain, Leases, OneLease, Prewarm
from service.endpoints.cache_events import CacheEvents
from service.endpoints.catalog import Model, Models
from service.endpoints.chat import ChatCompletions
from service.endpoints.completions import Completions
from service.endpoints.messages import CountTokens, Messages
from service.endpoints.metrics import MetricsEndpoint
from service.endpoints.responses import (
    CancelResponse,
    CreateResponse,
    DeleteResponse,
    InputItems,
    InputTokens,
    RetrieveResponse,
)
from service.endpoints.responses_socket import ResponsesSockets
from service.endpoints.roofline import Roofline
from service.endpoints.tokens import Detokenize, Tokenize
from service.errors import ApiError
from service.events import new_trace_number, trace_id_of
from service.services import Services
from service.telemetry.log_context import TRACE_ID
from service.telemetry.metric_list import HTTP_REQUESTS
from service.transport.http import ClientGone, send_answer, send_error
from service.transport.intake import Hold, TimedBody

_METHODS: Final = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
_UNDER_V1: Final = ("chat", "completions", "responses", "messages", "models")
MAX_LOGGED: Final = 300
_REQUEST_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

log = logging.getLogger(__name__)


def create_app(services: Services) -> "App":
    """The edge as one ASGI application: HTTP and WebSocket, no lifespan of its own."""
    sockets = ResponsesSockets(services)
    routes = Router(_routes(services, sockets), redirect_slashes=False, default=unknown_url)
    return App(_guarded(routes, services), services, sockets, services.responses, services.feed)


def _guarded(app: ASGIApp, services: Services) -> ASGIApp:
    settings = services.settings
    if services.keys is not None:
        app = CredentialMiddleware(app, services.keys)  # inside CORS: a preflight has no key
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id"),
        )
    return OriginMiddleware(app, settings)


def _routes(services: Services, sockets: ResponsesSockets) -> list[BaseRoute]:
    engine, card = services.engine, services.card
    return [
        Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
        Route("/v1/completions", Completions(services), methods=["POST"]),
        WebSocketRoute("/v1/responses", sockets),
        Route("/v1/responses", UpgradeRequired(), methods=["GET"]),
        Route("/v1/responses", CreateResponse(services), methods=["POST"]),
        Route("/v1/responses/input_tokens", InputTokens(services), methods=["POST"]),
        Route("/v1/responses/{id}", RetrieveResponse(services), methods=["GET"]),
        Route("/v1/responses/{id}", DeleteResponse(services), methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", CancelResponse(services), methods=["POST"]),
        Route("/v1/responses/{id}/input_items", InputItems(services), methods=["GET"]),
        Route("/v1/messages", Messages(services), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokens(services), methods=["POST"]),
        Route("/v1/models", Models(card), methods=["GET"]),
        Route("/v1/models/{model:path}", Model(card), methods=["GET"]),
        Route("/v1/cache/explain", Explain(services), methods=["POST"]),
        Route("/v1/cache/prewarm", Prewarm(services), methods=["POST"]),
        Route("/v1/cache/events", CacheEvents(services), methods=["GET"]),
        Route("/v1/cache/leases", Leases(services), methods=["GET", "POST"]),
        Route("/v1/cache/leases/{id}", OneLease(services), methods=["GET", "POST", "DELETE"]),
        Route("/tokenize", Tokenize(services), methods=["POST"]),
        Route("/detokenize", Detokenize(services), methods=["POST"]),
        Route("/health", Health(engine), methods=["GET"]),
        Route("/health/ready", Ready(engine), methods=["GET"]),
        Route("/v1/roofline", Roofline(engine), methods=["GET"]),
        Route("/metrics", MetricsEndpoint(services.metrics), methods=["GET"]),
        Route("/", Elsewhere("dashboard"), methods=["GET"]),
        Route("/dashboard", page := DashboardPage(), methods=["GET"]),
        Route("/dashboard/", Elsewhere("../dashboard"), methods=["GET"]),
        Route("/dashboard/{name}", page, methods=["GET"]),
        WebSocketRoute("/admin/feed", FeedSocket(services.feed).endpoint),
        Route("/admin/feed", UpgradeRequired(), methods=["GET"]),
        Route(
            "/admin/tree/{page:int}",
            TreeNode(engine, services.assets.vocabulary),
            methods=["GET"],
        ),
        Route("/admin/pool", Pool(engine), methods=["GET"]),
        Route("/admin/cache/flush", Flush(engine), methods=["POST"]),
    ]


async def unknown_url(scope: Scope, receive: Receive, send: Send) -> None:
    """404 for a path that no route has, for WebSockets too, whose clients tend to show no more of
    it than the status: the log has the rest."""
    is_socket = scope["type"] == "websocket"
    where = f"{'WebSocket' if is_socket else scope['method']} {scope['path']}"
    socket_path = " WebSockets are at /v1/responses." if is_socket else ""
    message = f"Unknown URL: {where}.{_right_base(scope['path'])}{socket_path}"
    if is_socket:
        log.info("refused: %r", message[:MAX_LOGGED])
    await refuse(ApiError(404, message, code="unknown_url"), scope, send)


class Elsewhere:
    """What a newcomer asks for first: leads to the dashboard, and says what else there is."""

    def __init__(self, location: str) -> None:
        """`location` is relative, as the server may stand below another's path."""
        self._location = location

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        there = {"dashboard": "/dashboard", "api": "/v1", "models": "/v1/models"}
        body = msgspec.json.encode({**there, "health": "/health", "metrics": "/metrics"})
        await send_answer(send, 307, body, {"location": self._location})


class UpgradeRequired:
    """A WebSocket's path, asked for without the upgrade."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(
            426,
            f"GET {scope['path']} is a WebSocket here: connect with an Upgrade header.",
            code="upgrade_required",
            headers={"upgrade": "websocket", "connection": "upgrade"},
        )


class Drains(Protocol):
    """What has work of its own that outlives requests."""

    async def drain(self) -> None: ...


class App:
    """The outermost layer: gives each request its id, and turns what is raised into answers.

    The id is the client's `x-request-id` where that is sane, and is echoed, under Anthropic's name
    for it too. Endpoints find it as `scope["state"]["request_id"]`, and whose request it is as
    `scope["state"]["tenant"]`: the shared tenant's, unless keys say otherwise. Every line that is
    logged on the way tells the trace: the caller's, or one that begins here, whose number is
    `scope["state"]["trace_number"]`. What an HTTP request
    brings is held against `intake` until it has ended.
    """

    def __init__(self, app: ASGIApp, services: Services, *draining: Drains) -> None:
        self._app = app
        self._counts = services.counts
        self.connections = services.connections
        self.intake = services.intake
        self._draining = draining

    async def drain(self) -> None:
        """Refuse new work on WebSockets and return when all of them are closed, each after its
        running turns, and background responses have ended. HTTP requests end with what the
        engine's own drain makes of them."""
        async with anyio.create_task_group() as tasks:
            for each in self._draining:
                tasks.start_soon(each.drain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        headers = Headers(scope=scope)
        request_id, trace_number = _request_id(headers.get("x-request-id")), new_trace_number()
        TRACE_ID.set(trace_id_of(headers.get("traceparent"), trace_number))
        scope.setdefault("state", {}).update(
            request_id=request_id,
            trace_number=trace_number,
            tenant=SHARED_TENANT,
        )
        scope["app"] = self  # so that the router raises its 405 instead of answering it
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope, message["status"])
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"request-id", request_id.encode()),
                ]
            await send(message)

        hold = Hold(self.intake)
        body = TimedBody(receive, hold, self.intake.limits)
        try:
            await self._app(scope, body, send_with_id)
        except ClientGone:
            log.info("request %s: the client left", request_id)
        except Exception as error:
            answer = _answer_for(error, scope, request_id)
            if not started:
                await _send_error(send_with_id, answer, scope, request_id)
        finally:
            hold.release()

    def _count(self, scope: Scope, status: int) -> None:
        """Paths and methods that no route knows are one: clients may make up any number."""
        route = scope.get("route")
        handler = "none" if route is None else route.path
        method = scope["method"] if scope["method"] in _METHODS else "other"
        labels = (handler, method, f"{status // 100}xx")
        self._counts.add(HTTP_REQUESTS, labels)


async def _send_error(send: Send, error: ApiError, scope: Scope, request_id: str) -> None:
    """A refusal in the shape of the dialect that the client speaks."""
    if not _speaks_anthropic(scope):
        await send_error(send, error)
        return
    body = encode_error(error, request_id)
    await send_answer(send, error_status(error), body, error.headers)


def _speaks_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


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
    if error.status_code == 405:
        return ApiError(
            405,
            f"{where} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}.",
            code="method_not_allowed",
            headers=error.headers,
        )
    return ApiError(error.status_code, str(error.detail))


def _right_base(path: str) -> str:
    """What is wrong with the base URL of a client that asks for this path, if that is it."""
    if path.startswith("/v1/v1/"):
        return " This client adds /v1 by itself: leave it out of its base URL."
    if path.strip("/").split("/")[0] in _UNDER_V1:
        return f" The API is under /v1: the base URL ends in /v1, and this is /v1{path}."
    return ""

"""A server on a real socket whose engine says what a test wants, and a client that checks order."""

import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.routing import Route, Router, WebSocketRoute
from websockets.asyncio.client import ClientConnection, connect

from engine.scripted import Script
from engine.types import EngineRequest, unpack_tokens
from service.app import App, create_app
from service.config import Settings
from service.endpoints.admin import Pool
from service.endpoints.responses_socket import ResponsesSockets, SocketLimits
from service.services import Services
from tests.service.conftest import MODEL, LiveServer, byte_assets, run_server

Frame: TypeAlias = dict[str, Any]
ScriptFor: TypeAlias = Callable[[str], Script]
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


@dataclass(frozen=True, slots=True)
class Live:
    """A running server. `prompts` are the texts its engine was given, in order."""

    server: LiveServer
    prompts: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}/v1/responses"

    def connect(self, **options: Any) -> connect:
        """A client's connection, as an async context manager."""
        return connect(self.url, proxy=None, **options)


def recording(play: ScriptFor | Script, prompts: list[str]) -> Callable[[EngineRequest], Script]:
    """The engine's script for a request: what `play` says to its prompt, added to `prompts`."""

    def script(request: EngineRequest) -> Script:
        tokens = unpack_tokens(request.token_ids).tolist()
        prompts.append(byte_assets().vocabulary.join(tokens).decode())
        return play if isinstance(play, Script) else play(prompts[-1])

    return script


@asynccontextmanager
async def serving(
    play: ScriptFor | Script,
    limits: SocketLimits | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[Live]:
    """A server, on a thread of its own, whose engine plays what a test wants for each prompt."""

    def app_for(services: Services) -> App:
        sockets = ResponsesSockets(services, limits)
        routes = [
            WebSocketRoute("/v1/responses", sockets),
            Route("/admin/pool", Pool(services.engine)),
        ]
        return App(Router(routes), services, sockets, services.responses)

    prompts: list[str] = []
    with run_server(
        script_for=recording(play, prompts),
        settings=settings,
        app_for=app_for if limits else create_app,
    ) as server:
        yield Live(server, prompts)


async def create(socket: ClientConnection, **body: Any) -> None:
    """Send a `response.create`."""
    fields = {"type": "response.create", "model": MODEL, "input": "hi", **body}
    await socket.send(json.dumps(fields))


async def receive(socket: ClientConnection) -> Frame:
    """The next frame, which is text."""
    data = await socket.recv()
    assert isinstance(data, str)
    frame: Frame = json.loads(data)
    return frame


async def until(
    socket: ClientConnection, type: str, seen: list[Frame] | None = None, lane: str | None = None
) -> Frame:
    """Read up to the first frame of a type on a lane; all that was read is added to `seen`."""
    while True:
        frame = await receive(socket)
        if seen is not None:
            seen.append(frame)
        if frame["type"] == type and frame.get("stream_id") == lane:
            return frame


async def turn(socket: ClientConnection, **body: Any) -> list[Frame]:
    """Send a create and read up to its terminal frame, with nothing else in between."""
    await create(socket, **body)
    frames = [await receive(socket)]
    while frames[-1]["type"] not in TERMINAL:
        frames.append(await receive(socket))
    return frames


def said(frames: list[Frame], lane: str | None = None) -> str:
    """The deltas of a lane, joined."""
    kind = "response.output_text.delta"
    mine = (frame for frame in frames if frame.get("stream_id") == lane)
    return "".join(frame["delta"] for frame in mine if frame["type"] == kind)


def by_lane(frames: list[Frame]) -> dict[str | None, list[Frame]]:
    """Frames by lane, in their order."""
    lanes: dict[str | None, list[Frame]] = {}
    for frame in frames:
        lanes.setdefault(frame.get("stream_id"), []).append(frame)
    return lanes


def one_after_another(*scripts: Script) -> ScriptFor:
    """The n-th request gets the n-th script, the last one from then on."""
    following = itertools.chain(scripts, itertools.repeat(scripts[-1]))
    return lambda prompt: next(following)


def by_word(**scripts: Script) -> ScriptFor:
    """A request gets the script of the word that its prompt has."""
    return lambda prompt: next(script for word, script in scripts.items() if word in prompt)

"""A small server of all dialects over real sockets, which plays what a test tells it to."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

Event = dict[str, Any]


@dataclass
class Play:
    """How the server behaves. Each answer is `pieces`, `delay_s` apart.

    `ending` is "end"; "cut" (no end), "stall" (keep-alives for ever), "endless" (text for ever) or
    "error" after the pieces.
    `status` other than 200 refuses. `usage` replaces prompt, output and cached tokens. `gate` is
    awaited before each answer. `model` is the one that is listed. What arrived is in `bodies`,
    when each piece left in `sent_s`.
    """

    pieces: tuple[str, ...] = ("one ", "two ", "three")
    delay_s: float = 0.0
    ending: str = "end"
    status: int = 200
    usage: tuple[int, int, int] | None = None
    gate: Callable[[], Awaitable[None]] | None = None
    model: str = "played"
    bodies: list[Event] = field(default_factory=list)
    sent_s: list[list[float]] = field(default_factory=list)

    def counts(self) -> tuple[int, int, int]:
        """Prompt, output and cached tokens."""
        return self.usage or (100, len(self.pieces), 80)

    async def refuse(self, request: Request) -> Response | None:
        """Note the body; the answer of a server that refuses."""
        self.bodies.append(await request.json())
        if self.gate is not None:
            await self.gate()
        if self.status == 200:
            return None
        return JSONResponse({"error": {"message": "busy"}}, self.status, {"retry-after": "3"})

    async def say(self) -> AsyncIterator[str]:
        """The pieces, each noted as it leaves."""
        times: list[float] = []
        self.sent_s.append(times)
        for piece in self.pieces:
            await asyncio.sleep(self.delay_s)
            times.append(time.perf_counter())
            yield piece

    async def frames(
        self, start: list[Event], piece: Callable[[str], Event], end: list[Event], error: Event
    ) -> AsyncIterator[Event | None]:
        """Events of an answer in some dialect; None is a keep-alive."""
        for event in start:
            yield event
        async for text in self.say():
            yield piece(text)
        if self.ending == "error":
            yield error
        elif self.ending == "stall":
            while True:
                await asyncio.sleep(0.02)
                yield None
                yield piece("")
        elif self.ending == "endless":
            while True:
                await asyncio.sleep(0)
                yield piece("more ")
        elif self.ending == "end":
            for event in end:
                yield event


def sse(events: AsyncIterator[Event | None], *, done: bool = False) -> StreamingResponse:
    """An event stream."""

    async def body() -> AsyncIterator[str]:
        async for event in events:
            yield ": alive\n\n" if event is None else f"data: {json.dumps(event)}\n\n"
        if done:
            yield "data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def chat_usage(play: Play) -> Event:
    prompt, output, cached = play.counts()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def responses_events(play: Play, number: int) -> AsyncIterator[Event | None]:
    """Of the Responses dialect, for SSE and WebSocket alike."""
    prompt, output, cached = play.counts()
    usage = {
        "input_tokens": prompt,
        "output_tokens": output,
        "input_tokens_details": {"cached_tokens": cached},
    }
    response = {"id": f"resp_{number}"}
    return play.frames(
        [{"type": "response.created", "response": response}],
        lambda text: {"type": "response.output_text.delta", "delta": text},
        [{"type": "response.completed", "response": {**response, "usage": usage}}],
        {"type": "error", "code": "server_error", "message": "it broke"},
    )


def application(play: Play) -> Starlette:
    """The server's routes."""

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": play.model}]})

    async def chat(request: Request) -> Response:
        if refused := await play.refuse(request):
            return refused
        if not play.bodies[-1].get("stream"):
            message = {"role": "assistant", "content": "".join([p async for p in play.say()])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return JSONResponse({"choices": [choice], "usage": chat_usage(play)})
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        events = play.frames(
            [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}],
            lambda text: {"choices": [{"index": 0, "delta": {"content": text}}]},
            [finish, {"choices": [], "usage": chat_usage(play)}],
            {"error": {"message": "it broke"}},
        )
        return sse(events, done=play.ending == "end")

    async def responses(request: Request) -> Response:
        if refused := await play.refuse(request):
            return refused
        return sse(responses_events(play, len(play.bodies)))

    async def messages(request: Request) -> Response:
        if refused := await play.refuse(request):
            return refused
        prompt, output, cached = play.counts()
        start = {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": 1,
        }
        events = play.frames(
            [{"type": "message_start", "message": {"usage": start}}, {"type": "ping"}],
            lambda text: {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            },
            [
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn"},
                    "usage": {"output_tokens": output},
                },
                {"type": "message_stop"},
            ],
            {"type": "error", "error": {"type": "api_error", "message": "it broke"}},
        )
        return sse(events)

    async def sockets(websocket: WebSocket) -> None:
        if play.status != 200:
            await websocket.close()
            return
        await websocket.accept()
        tasks = set()
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                body = json.loads(await websocket.receive_text())
                play.bodies.append(body | {"connection": id(websocket)})
                task = asyncio.create_task(lane(websocket, body["stream_id"], len(play.bodies)))
                tasks.add(task)
        for task in tasks:
            task.cancel()

    async def lane(websocket: WebSocket, name: str, number: int) -> None:
        async for event in responses_events(play, number):
            if event is not None:
                await websocket.send_text(json.dumps(event | {"stream_id": name}))
        if play.ending == "cut":
            await websocket.close(1011)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            WebSocketRoute("/v1/responses", sockets),
            Route("/v1/messages", messages, methods=["POST"]),
        ]
    )


class Quiet(uvicorn.Server):
    """A server in a thread of ours: signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def playing(play: Play) -> Iterator[str]:
    """The server on a free port of this machine, as long as the block; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application(play),
        log_config=None,
        ws="websockets-sansio",
        timeout_graceful_shutdown=1,
        lifespan="off",
    )
    server = Quiet(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def mortal(num_answers: int) -> None:
    """Plays as a process of its own, which says its URL and is gone, mid-stream, when one more
    request comes than `num_answers`."""
    play = Play(pieces=("word ",) * 20, delay_s=0.02)

    async def gate() -> None:
        if len(play.bodies) > num_answers:
            os.kill(os.getpid(), signal.SIGKILL)

    play.gate = gate
    with playing(play) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    mortal(int(sys.argv[1]))

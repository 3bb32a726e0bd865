"""`python -m tests.faults.serve serve ...`: the server, with parts that fail when asked."""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

import service.command as command
from engine.api import Engine
from engine.text import Encoder, TextAssets, load_text
from engine.transport import start_supervised_engine
from service.__main__ import main
from service.app import App, create_app
from service.services import Services
from service.transport.http import send_json
from tests.faults.control import ALL_TASKS, FOLDER_VARIABLE, take

STALL_S = 1.0


class FailingEncoder(Encoder):
    """An encoder that raises once each time it is asked to."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self._encoder.prefix_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> NDArray[np.int32]:
        if take("tokenizer"):
            raise RuntimeError("injected into the tokenizer")
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)


class WatchedApp:
    """The app, with `/test/audit` beside it and a line in `records` for each whole answer to a
    request that has an id. Stalls the event loop when asked."""

    def __init__(self, app: App, engine: Engine) -> None:
        self._app = app
        self._engine = engine
        self._records = Path(os.environ[FOLDER_VARIABLE], "records")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if take("stall"):
            time.sleep(STALL_S)  # noqa: ASYNC251 (the fault)
        if scope["type"] == "http" and scope["path"] == "/test/audit":
            await send_json(send, msgspec.to_builtins(await self._engine.audit()))
            return
        request_id = Headers(scope=scope).get("x-request-id")
        if request_id is None:
            await self._app(scope, receive, send)
            return
        last = b""
        status = 0

        async def watched(message: Message) -> None:
            nonlocal last, status
            status = message.get("status", status)
            last = message.get("body") or last
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._note(request_id, status == 200 and b'"error"' not in last)

        await self._app(scope, receive, watched)

    def _note(self, request_id: str, whole: bool) -> None:
        with self._records.open("a") as records:
            records.write(json.dumps({"request_id": request_id, "whole": whole}) + "\n")


def load_failing_text(path: Path) -> TextAssets:
    """`load_text`, with its encoder wrapped."""
    assets = load_text(path)
    return replace(assets, encoder=FailingEncoder(assets.encoder))


def create_watched_app(services: Services) -> WatchedApp:
    """`create_app`, wrapped, in a process that can be asked what it waits for."""
    loop = asyncio.get_running_loop()

    def tell_tasks() -> None:
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=sys.stderr)
        sys.stderr.write(f"{ALL_TASKS}\n")

    loop.add_signal_handler(signal.SIGUSR1, tell_tasks)
    return WatchedApp(create_app(services), services.engine)


if __name__ == "__main__":
    command.load_text = load_failing_text  # type: ignore[attr-defined]
    command.create_app = create_watched_app  # type: ignore[attr-defined,assignment]
    command.start_supervised_engine = partial(  # type: ignore[attr-defined]
        start_supervised_engine, module="tests.faults.engine"
    )
    raise SystemExit(main())

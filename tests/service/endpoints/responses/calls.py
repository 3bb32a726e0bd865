"""What these tests say over HTTP, and how they read the events of a stream."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
from openai import OpenAI

from engine.scripted import Script
from service.config import Settings
from tests.service.conftest import MODEL, LiveServer, run_server
from tests.service.websocket.live import ScriptFor, recording

Event: TypeAlias = dict[str, Any]
PATH = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Live:
    """A running server, an SDK client of it, and the prompts that its engine was given."""

    server: LiveServer
    client: OpenAI
    prompts: list[str] = field(default_factory=list)

    def post(self, **fields: Any) -> httpx.Response:
        """A create."""
        return self.server.http.post(PATH, json={"model": MODEL, "input": "hi", **fields})

    def create(self, **fields: Any) -> dict[str, Any]:
        """The object of a create that succeeds."""
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def get(self, response_id: str) -> dict[str, Any]:
        """A stored response's object."""
        answer = self.server.http.get(f"{PATH}/{response_id}")
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def wait_until_ended(self, response_id: str) -> dict[str, Any]:
        """Poll as clients of background responses do."""
        while True:
            response = self.get(response_id)
            if response["status"] not in ("queued", "in_progress"):
                return response

    def follow(self, response_id: str) -> "Future[list[Event]]":
        """The events of a stored response as they come, once the first has come; the future has
        them when it has ended."""
        told: Future[list[Event]] = Future()
        begun = threading.Event()

        def read() -> None:
            try:
                path = f"{PATH}/{response_id}?stream=true"
                with self.server.http.stream("GET", path) as answer:
                    pieces = answer.iter_text()
                    first = next(pieces)
                    begun.set()
                    told.set_result(events_of(first + "".join(pieces)))
            except BaseException as error:
                begun.set()
                told.set_exception(error)

        threading.Thread(target=read).start()
        begun.wait()
        return told

    def replay(self, response_id: str, after: int | None = None) -> list[Event]:
        """The events of a stored response."""
        query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
        answer = self.server.http.get(f"{PATH}/{response_id}", params=query)
        assert answer.status_code == 200, answer.text
        return events_of(answer.text)


@contextmanager
def serving(play: ScriptFor | Script, settings: Settings | None = None) -> Iterator[Live]:
    """A server whose engine plays what a test wants for each prompt."""
    prompts: list[str] = []
    with (
        run_server(script_for=recording(play, prompts), settings=settings) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Live(server, client, prompts)


def events_of(text: str) -> list[Event]:
    """The events of a stream; each frame's name must be its event's type."""
    events: list[Event] = []
    for frame in text.split("\n\n"):
        if not frame or frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of a refusal."""
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error

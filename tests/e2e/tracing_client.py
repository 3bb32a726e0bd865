"""One request of each kind, each in a trace of its own, for tests of what a collector receives."""

import json
from typing import Any

import httpx
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.e2e.conftest import Server

PARENT = "b7ad6b7169203331"
TRACES = {
    name: f"{number:032x}"
    for number, name in enumerate(
        ("chat", "responses", "first", "fork", "messages", "cut", "failed", "refused", "choices"), 1
    )
}
"""The trace id of each request, by what it is."""

_QUESTION = "Say hello to each of the seven seas, one after another, in a few words each."
_CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": _QUESTION}],
    "max_tokens": 8,
}


def traceparent(name: str, flags: str = "01") -> str:
    return f"00-{TRACES[name]}-{PARENT}-{flags}"


def ask_everything(server: Server) -> None:
    """Returns when every request has ended, as far as a client can know."""
    _post(server.http, "chat", "/v1/chat/completions", {**_CHAT, "stop": ["zzz"]}, "03")
    _post(
        server.http,
        "responses",
        "/v1/responses",
        {"model": "default", "input": _QUESTION, "max_output_tokens": 8},
    )
    message = {**_CHAT, "max_tokens": 8}
    _post(server.http, "messages", "/v1/messages", message)
    _post(server.http, "choices", "/v1/chat/completions", {**_CHAT, "n": 2})
    _ask_on_two_lanes(server)
    _cut(server.http)
    failed = {**_CHAT, "max_tokens": 4000, "timeout": 0.05, "ignore_eos": True}
    _post(server.http, "failed", "/v1/chat/completions", failed, status=408)
    _post(server.http, "refused", "/v1/chat/completions", {**_CHAT, "top_p": 7}, status=400)


def _post(
    http: httpx.Client,
    name: str,
    path: str,
    body: dict[str, Any],
    flags: str = "01",
    status: int = 200,
) -> None:
    answer = http.post(path, json=body, headers={"traceparent": traceparent(name, flags)})
    assert answer.status_code == status, answer.text


def _ask_on_two_lanes(server: Server) -> None:
    """A turn, and a fork from it on another lane; each message brings a context of its own."""
    url = server.url.replace("http", "ws") + "/v1/responses"
    handshake = {"traceparent": traceparent("chat")}
    with connect(url, additional_headers=handshake) as socket:
        first = _turn(socket, "first", stream_id="a")
        _turn(socket, "fork", stream_id="b", previous_response_id=first)


def _turn(socket: Connection, name: str, **fields: str) -> str:
    """A finished turn's response id."""
    request = {
        "type": "response.create",
        "model": "default",
        "input": f"{_QUESTION} Then {name}.",
        "max_output_tokens": 8,
        "metadata": {"traceparent": traceparent(name)},
        **fields,
    }
    socket.send(json.dumps(request))
    while True:
        frame = json.loads(socket.recv())
        assert frame["type"] not in ("error", "response.failed"), frame
        if frame["type"] in ("response.completed", "response.incomplete"):
            return str(frame["response"]["id"])


def _cut(http: httpx.Client) -> None:
    """Leave a stream after its second piece."""
    body = {**_CHAT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    headers = {"traceparent": traceparent("cut")}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
        pieces = 0
        for line in stream.iter_lines():
            pieces += line.startswith("data: ")
            if pieces == 3:
                break

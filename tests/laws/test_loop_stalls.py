"""Law 5: nothing keeps the event loop for long, for bodies up to 1 MB, on any route."""

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pytest

from engine.scripted import text_script
from engine.text import load_text
from engine.text.default_model import find_default_model
from service.command import SWITCH_INTERVAL_S
from tests.service.conftest import INFO, MODEL, LiveServer, run_server
from tests.service.raw import connected, masked_frame, open_websocket

SIZE = 1_000_000
TICK_S = 0.001
BOUND_S = 0.012
"""The law's 5 ms, and what the probe itself and its client's thread take."""
WAIT_S = 0.1
"""A loop that waits longer than this for others' work on the machine waits for something else."""
TRIES = 40
"""What other threads of this process do stalls the loop too, now and then; a stall that is the
server's own comes at every try. So one try within the bound is enough."""
WORDS = "the river remembers every stone it has passed and "


class Probe:
    """Ticks on the server's loop; `longest_s` is the longest time it could not: while this process
    computed, not while the machine did something else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest_s = 0.0
        self._loop = loop
        self._last_s, self._last_cpu_s = time.perf_counter(), time.process_time()
        loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        now_s, cpu_s = time.perf_counter(), time.process_time()
        gap_s = now_s - self._last_s - TICK_S
        computed_s = min(gap_s, cpu_s - self._last_cpu_s)
        self.longest_s = max(self.longest_s, computed_s, gap_s - WAIT_S)
        self._last_s, self._last_cpu_s = now_s, cpu_s
        self._loop.call_later(TICK_S, self._tick)

    def during(self, request: Callable[[], None]) -> float:
        """The longest stall while `request` is called."""
        self.longest_s = 0.0
        request()
        return self.longest_s


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    path = find_default_model()
    if path is None:
        pytest.skip("the default model, whose tokenizer this needs, is not installed")
    assets = load_text(path)
    info = msgspec.structs.replace(
        INFO, vocab_size=assets.vocabulary.size, max_context=1 << 21, num_pages=1 << 18
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    script = text_script("ok", delay_s=0.001)
    try:
        with run_server(script, info=info, assets=assets) as running:
            yield running
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def text(num_bytes: int) -> str:
    return (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]


def tools(num_bytes: int, *, nested: bool) -> list[dict[str, Any]]:
    """Tools of many small properties."""
    properties = {f"p{i}": {"type": "string", "description": text(50)} for i in range(40)}
    function = {"name": "f", "description": text(200), "parameters": {"properties": properties}}
    tool = (
        {"type": "function", "function": function} if nested else {"type": "function", **function}
    )
    return [tool] * (num_bytes // len(json.dumps(tool)))


def messages(num_bytes: int) -> list[dict[str, Any]]:
    pair: list[dict[str, Any]] = [
        {"role": "user", "content": text(400)},
        {"role": "assistant", "content": [{"type": "text", "text": text(400)}]},
    ]
    return [*pair * (num_bytes // len(json.dumps(pair))), pair[0]]


def tool(enum: list[Any], **fields: Any) -> dict[str, Any]:
    """A tool whose parameters are one list, in this form and that."""
    parameters = {"enum": enum, **fields}
    function = {"name": "f", "parameters": parameters}
    return {"type": "function", "function": function, **function, "input_schema": parameters}


def called(input: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of Messages in which a tool was called."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": input}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


EMPTY: list[Any] = [[]] * (SIZE // 4)
LONG = [{"role": "user", "content": text(SIZE)}]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, one long message": ("/v1/chat/completions", {"messages": LONG}),
    "chat, many messages": ("/v1/chat/completions", {"messages": messages(SIZE)}),
    "chat, many tools": (
        "/v1/chat/completions",
        {"messages": messages(1000), "tools": tools(SIZE, nested=True)},
    ),
    "completions, text": ("/v1/completions", {"prompt": text(SIZE)}),
    "completions, echo": ("/v1/completions", {"prompt": text(SIZE), "echo": True}),
    "completions, tokens": ("/v1/completions", {"prompt": [1234] * (SIZE // 6)}),
    "responses, streamed": ("/v1/responses", {"input": text(SIZE), "stream": True}),
    "responses, messages": ("/v1/responses", {"input": messages(SIZE)[::2]}),
    "responses, instructions": (
        "/v1/responses",
        {"input": "hi", "instructions": text(SIZE), "stream": True},
    ),
    "responses, tools": (
        "/v1/responses",
        {"input": "hi", "tools": tools(SIZE, nested=False), "stream": True},
    ),
    "messages": ("/v1/messages", {"messages": LONG, "max_tokens": 9}),
    "tokenize": ("/tokenize", {"prompt": text(SIZE)}),
    "tokenize, one word": (
        "/tokenize",
        {"prompt": "".join(random.Random(1).choices("abcdefghij", k=SIZE))},
    ),
    "detokenize": ("/detokenize", {"tokens": [1234] * (SIZE // 6)}),
    "no JSON": ("/v1/chat/completions", {"": "\ud800" * (SIZE // 6)}),
    "a list of lists": ("/v1/chat/completions", {"messages": [[]] * (SIZE // 4)}),
    "chat, a tool of lists": (
        "/v1/chat/completions",
        {"messages": messages(100), "tools": [tool(EMPTY)]},
    ),
    "chat, as many lists as may be": (
        "/v1/chat/completions",
        {"messages": messages(100), "tools": [tool([[]] * 24_000)]},
    ),
    "chat, a tool of numbers": (
        "/v1/chat/completions",
        {"messages": messages(100), "tools": [tool([1] * (SIZE // 3))]},
    ),
    "responses, a tool of lists": ("/v1/responses", {"input": "hi", "tools": [tool(EMPTY)]}),
    "responses, items of lists": ("/v1/responses", {"input": EMPTY}),
    "messages, a tool of keys": (
        "/v1/messages",
        {
            "messages": messages(100),
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": {f"{i:x}": 0 for i in range(SIZE // 12)}}],
        },
    ),
    "messages, a call of lists": (
        "/v1/messages",
        {"messages": called({"a": EMPTY}), "max_tokens": 9},
    ),
    "an unknown field of lists": ("/v1/chat/completions", {"messages": messages(9), "x": EMPTY}),
}


def http_request(path: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({"model": MODEL, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


SLOW: Final = ("tokenize, one word",)
"""A second of tokenising for each try."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_a_body_of_one_megabyte_does_not_stall_the_loop(server: LiveServer, name: str) -> None:
    request = http_request(*CASES[name])
    buffer = bytearray(1 << 20)

    def post() -> None:
        with connected(server) as sock:
            sock.sendall(request)
            assert sock.recv(1 << 10).startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
            while sock.recv_into(buffer):
                pass

    check(server, post)


@pytest.mark.parametrize("field", ["input", "instructions"])
def test_a_frame_of_one_megabyte_does_not_stall_the_loop(server: LiveServer, field: str) -> None:
    create = {"type": "response.create", "model": MODEL, "input": "hi", field: text(SIZE)}
    frame = masked_frame(json.dumps(create).encode())
    with connected(server) as sock:
        open_websocket(sock)

        def turn() -> None:
            sock.sendall(frame)
            tail = b""
            while b'"type":"response.completed"' not in tail:
                piece = sock.recv(1 << 18)
                tail = tail[-64:] + piece

        check(server, turn)


def check(server: LiveServer, request: Callable[[], None]) -> None:
    probe = Probe(server.loop)
    stalls = []
    for _ in range(TRIES):
        stalls.append(probe.during(request))
        if stalls[-1] < BOUND_S:
            return
    pytest.fail(f"the loop stalls for {min(stalls) * 1e3:.1f} ms at least")

"""Whatever comes over a socket, each message gets its answer, and the socket and others live on."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from engine.scripted import text_script
from tests.service.calls import ask, content
from tests.service.conftest import MODEL, LiveServer, run_server
from tests.service.fuzz.bodies import frames
from tests.service.fuzz.test_bodies import neighbour

SAID = "ok, and whole"
ENDS = ("response.completed", "response.incomplete", "error", "response.steer.failed")
LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
PROBE = '{"type": "are you there?"}'


# The server's thread draws trace ids meanwhile, which hypothesis takes for the strategies' doing.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning",
    "ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning",
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script(SAID)) as running:
        yield running


def dial(server: LiveServer) -> Connection:
    return connect(f"ws://127.0.0.1:{server.port}/v1/responses", proxy=None)


def is_silent(message: str | bytes) -> bool:
    """Whether this is the one message that is never answered: an acknowledgement in order."""
    try:
        read = json.loads(message) if isinstance(message, str) else None
    except (ValueError, RecursionError):
        return False
    if not isinstance(read, dict) or read.get("type") != "response.processed":
        return False
    lane = read.get("stream_id")
    return lane is None or (isinstance(lane, str) and bool(LANE.fullmatch(lane)))


def tried(socket: Connection, messages: list[str | bytes]) -> None:
    """Sent at once, each message has one end; its frames are numbered without a gap."""
    for message in messages:
        socket.send(message)
    socket.send(PROBE)
    due = 1 + sum(not is_silent(message) for message in messages)
    numbers: dict[str | None, int] = {}
    probes = 0
    while due:
        frame: dict[str, Any] = json.loads(socket.recv(timeout=20))
        lane = frame.get("stream_id")
        if frame["type"] == "error":
            assert 400 <= frame["status"] < 500, frame
            assert frame["error"]["message"]
            probes += "are you there?" in frame["error"]["message"]
        elif frame["type"] != "response.steer.failed":
            number = 0 if frame["type"] == "response.created" else numbers[lane] + 1
            assert frame["sequence_number"] == number
            numbers[lane] = number
        due -= frame["type"] in ENDS
    assert probes == 1


def turn(socket: Connection) -> str:
    """What a sound create is answered with."""
    socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hi"}))
    said = ""
    while (frame := json.loads(socket.recv(timeout=20)))["type"] != "response.completed":
        said += frame["delta"] if frame["type"] == "response.output_text.delta" else ""
    return said


def fuzz(server: LiveServer, num_messages: int) -> None:
    """At least so many messages on one socket, which is as good as new after them."""
    with dial(server) as socket:

        @settings(
            max_examples=num_messages,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(messages=st.lists(frames(), min_size=1, max_size=3))
        def some(messages: list[str | bytes]) -> None:
            tried(socket, messages)

        some()
        assert turn(socket) == SAID


def test_some_messages(server: LiveServer) -> None:
    fuzz(server, 200)
    assert server.wait_for_idle()["running"] == 0


@pytest.mark.slow
def test_five_thousand_messages_beside_a_neighbour(server: LiveServer) -> None:
    with neighbour(lambda: content(ask(server))) as answers:
        fuzz(server, 5000)
    assert len(answers) > 10
    assert set(answers) == {SAID}
    assert server.wait_for_idle()["running"] == 0

"""Ends of an engine that are easily missed: an edge that misses one waits for it for ever."""

import asyncio
import socket

import anyio
import pytest

from engine.api import EngineDead, EngineError
from engine.overload import QueueBounds
from engine.scripted import ScriptFile
from engine.stats import EngineLoad
from engine.transport import EngineClient, client
from engine.wire.frames import FrameSender
from engine.wire.messages import Ready, StartFailed, encode

pytestmark = pytest.mark.anyio


class Peer:
    """Whose end comes when the test wants it."""

    def __init__(self) -> None:
        self.num_kills = 0

    @property
    def pid(self) -> int | None:
        return None

    def kill(self) -> None:
        self.num_kills += 1

    def reap(self, timeout_s: float) -> str:
        return "it ended"


def client_of(ours: socket.socket, peer: Peer) -> EngineClient:
    return EngineClient(ours, peer, QueueBounds(64, max_waiting_tokens=1 << 20))


async def test_an_end_with_something_unread_on_both_sides_is_seen() -> None:
    """Linux tells the edge of what the engine left unread as an error, and uvloop tells of an
    error once, however much there is to read before the end."""
    ours, theirs = socket.socketpair()
    ours.send(b"left unread")
    FrameSender(theirs).push(encode(StartFailed("there is no room for the model")))
    theirs.close()
    peer = Peer()
    with anyio.fail_after(20), pytest.raises(EngineError, match="no room for the model"):
        await client_of(ours, peer).start()
    assert peer.num_kills == 0  # its end was seen, so nobody had to


@pytest.mark.parametrize("way", ["close", "drain"])
async def test_an_end_that_is_never_seen_is_not_waited_for(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLOSE_S", "ABORT_S", "KILLED_S"):
        monkeypatch.setattr(client, name, 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        FrameSender(theirs).push(encode(Ready(ScriptFile().info(page_size=16), EngineLoad())))
        peer = Peer()
        engine = client_of(ours, peer)
        await engine.start()
        asking = asyncio.ensure_future(engine.flush())
        await anyio.lowlevel.checkpoint()
        with anyio.fail_after(20):
            await (engine.close() if way == "close" else engine.drain(0.05))
            with pytest.raises(EngineDead):
                await asking
        assert peer.num_kills == 1
        assert engine.health.state == "ended"

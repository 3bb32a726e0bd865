"""After NousResearch/hermes-agent#57373, Kludex/uvicorn#258, python-websockets#625 and #1298.

A long silent prefill, or a client whose pongs are late, does not cost a healthy socket; a dead peer
does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from websockets.asyncio.client import connect

from engine.scripted import Script, ScriptStep
from service.config import Limits, Settings
from service.endpoints.responses_socket import SocketLimits
from tests.service.websocket.live import create, receive, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class SlowPath:
    """A way to the server on which what the client says is late, or lost once it is `dead`."""

    port: int
    late_s: float
    dead: bool = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """The port of its near end."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self.port)
        loop = asyncio.get_running_loop()

        def deliver(data: bytes) -> None:
            if not self.dead:
                forth.write(data)

        async def there() -> None:
            while data := await reader.read(65536):
                loop.call_later(self.late_s, deliver, data)

        going = asyncio.create_task(there())
        try:
            while data := await back.read(65536):
                writer.write(data)
        finally:
            going.cancel()
            writer.close()
            forth.close()


async def check(
    silence_s: float, late_s: float, limits: Limits, sockets: SocketLimits | None
) -> None:
    """A turn that is silent for so long, by a client whose every word is late."""
    script = Script((ScriptStep((111,), delay_s=silence_s), ScriptStep((107,))))
    async with serving(script, sockets, Settings(limits=limits)) as live:
        path = SlowPath(live.server.port, late_s)
        async with path.listening() as port:
            url = f"ws://127.0.0.1:{port}/v1/responses"
            async with connect(url, proxy=None, ping_interval=None, open_timeout=60) as socket:
                await create(socket)
                frame = await receive(socket)
                heard_s, num_progress, longest_s = time.monotonic(), 0, 0.0
                while frame["type"] != "response.completed":
                    assert frame["type"] not in ("response.failed", "error")
                    num_progress += frame["type"] == "response.in_progress"
                    frame = await receive(socket)
                    longest_s = max(longest_s, time.monotonic() - heard_s)
                    heard_s = time.monotonic()
                assert frame["response"]["output"][0]["content"][0]["text"] == "ok"
                at_least = (sockets or SocketLimits()).max_silence_s
                assert num_progress >= silence_s / at_least / 2
                if silence_s > 60:
                    assert longest_s < at_least + 1.0


async def check_dead(limits: Limits) -> float:
    """A peer that has vanished without a word: its pages are let go; after how long."""
    async with serving(Script(finish=None), None, Settings(limits=limits)) as live:
        path = SlowPath(live.server.port, 0.0)
        async with path.listening() as port:
            url = f"ws://127.0.0.1:{port}/v1/responses"
            async with connect(url, proxy=None, ping_interval=None) as socket:
                await create(socket)
                assert (await receive(socket))["type"] == "response.created"
                path.dead = True
                begin_s = time.monotonic()
                pool = await asyncio.to_thread(live.server.wait_for_idle)
                assert pool["referenced"] == 0
                return time.monotonic() - begin_s


QUICK = replace(Limits(), ws_ping_interval_s=0.4, ws_ping_timeout_s=2.0)


async def test_a_silent_turn_and_late_pongs() -> None:
    await check(3.0, 0.6, QUICK, SocketLimits(max_silence_s=0.5))


async def test_a_dead_peer_is_dropped() -> None:
    await check_dead(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_silence_of_90_s_and_pongs_15_s_late() -> None:
    await check(90.0, 15.0, Limits(), None)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_dead_peer_is_dropped_within_60_s() -> None:
    assert await check_dead(Limits()) < 60

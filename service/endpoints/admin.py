"""Health for orchestrators, and the operator's view of the page pool."""

from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from engine.api import Engine
from service.errors import asked
from service.transport.http import send_json

_MEASURED: Final = ("peak_bytes_per_s", "peak_flops_per_s")
"""What steps raise as they show more than was measured at the start: `/v1/roofline` has it."""


class Health:
    """`GET /health`: whether this process is worth keeping: 503 only once the engine has ended for
    good. The body says how the engine is; it asks nobody, so it answers whatever the engine does.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        health = self._engine.health
        await send_json(send, health, 503 if health.state == "ended" else 200)


class Ready:
    """`GET /health/ready`: whether new requests are taken, why not, and what would serve them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine
        reason = "" if engine.alive else engine.health.reason
        info = msgspec.to_builtins(engine.info)
        for name in _MEASURED:
            del info[name]
        answer = {"ready": engine.alive, "reason": reason, "engine": info}
        await send_json(send, answer, 200 if engine.alive else 503)


class Pool:
    """`GET /admin/pool`: pages by state, each in exactly one, and the engine's counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = msgspec.to_builtins(await asked(self._engine.stats()))
        await send_json(send, {**counts.pop("pool"), **counts})


class Flush:
    """`POST /admin/cache/flush`: drop every cached page that nothing references."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_pages = await asked(self._engine.flush())
        await send_json(send, {"flushed_pages": num_pages})

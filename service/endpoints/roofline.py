"""`GET /v1/roofline`: what the engine's steps waited for, beside what this machine can do."""

from starlette.types import Receive, Scope, Send

from engine.api import Engine
from service.errors import asked
from service.roofline import describe_machine, describe_work
from service.transport.http import send_json


class Roofline:
    """The sums by kind of step since the start, and the last steps one by one, oldest first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError when the engine is gone."""
        stats = await asked(self._engine.stats())
        answer = {
            "object": "roofline",
            "machine": describe_machine(self._engine.info, stats),
            "phases": [describe_work(work) for work in stats.work],
            "recent": [describe_work(work) for work in stats.recent_steps],
        }
        await send_json(send, answer)

"""Lanes of one connection: first in, first out within a lane, side by side across lanes."""

import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from service.conversation import JSONValue
from service.errors import RETRY_SOON, ApiError, invalid

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")

Turn = TypeVar("Turn")


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Bounds of one connection. What is over `max_running` waits; the others refuse."""

    max_lanes: int = 32
    max_running: int = 16
    max_waiting: int = 256
    max_waiting_bytes: int = 64 << 20


@dataclass(slots=True)
class _Lane(Generic[Turn]):
    waiting: deque[tuple[Turn, int]] = field(default_factory=deque)
    working: bool = False


class Lanes(Generic[Turn]):
    """Runs the turns of a connection as tasks of its task group, one per lane at a time.

    Named lanes are counted for the connection's life; the default lane (None) is not.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        run: Callable[[str | None, Turn], Awaitable[None]],
        limits: LaneLimits,
    ) -> None:
        """`run` handles every failure of its turn: what it raises ends the task group."""
        self._tasks = tasks
        self._run = run
        self._limits = limits
        self._lanes: dict[str | None, _Lane[Turn]] = {}
        self._running = anyio.Semaphore(limits.max_running)
        self._num_turns = 0
        self._num_waiting = 0
        self._waiting_bytes = 0
        self._idle = anyio.Event()

    def submit(self, stream_id: str | None, turn: Turn, num_bytes: int) -> None:
        """Put a turn at the end of its lane; `num_bytes` is what it holds in memory.

        Raises ApiError: `websocket_stream_limit_reached` for a lane too many, 429 when too much
        waits already.
        """
        lane = self._lanes.get(stream_id)
        if lane is None:
            named = len(self._lanes) - (None in self._lanes)
            if stream_id is not None and named >= self._limits.max_lanes:
                message = f"A connection has at most {self._limits.max_lanes} stream ids."
                raise ApiError(400, message, code="websocket_stream_limit_reached")
        if (
            self._num_waiting >= self._limits.max_waiting
            or self._waiting_bytes + num_bytes > self._limits.max_waiting_bytes
        ):
            raise ApiError(
                429,
                "Too many requests wait on this connection.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers=RETRY_SOON,
            )
        if lane is None:  # not before: a refused turn takes no lane
            lane = self._lanes[stream_id] = _Lane()
        lane.waiting.append((turn, num_bytes))
        self._num_turns += 1
        self._num_waiting += 1
        self._waiting_bytes += num_bytes
        if not lane.working:
            lane.working = True
            self._tasks.start_soon(self._work, stream_id, lane)

    async def wait_idle(self) -> None:
        """Return once no turn waits or runs."""
        while self._num_turns:
            await self._idle.wait()

    async def _work(self, stream_id: str | None, lane: _Lane[Turn]) -> None:
        while lane.waiting:
            async with self._running:
                turn, num_bytes = lane.waiting.popleft()
                self._num_waiting -= 1
                self._waiting_bytes -= num_bytes
                await self._run(stream_id, turn)
            self._num_turns -= 1
            if not self._num_turns:
                self._idle.set()
                self._idle = anyio.Event()
        lane.working = False


def check_stream_id(value: JSONValue) -> str | None:
    """The lane a message names; None is the default lane. Raises ApiError `invalid_stream_id`."""
    if value is None:
        return None
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        message = "A stream_id is 1 to 256 letters, digits, underscores, hyphens or periods."
        raise invalid("stream_id", message, "invalid_stream_id")
    return value

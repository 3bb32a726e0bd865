"""Steering: what a client adds to a response that runs, and what becomes of it.

Accepted input is the server's until a response that reads it has begun, or it is given back. It
lives no longer than its connection.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import anyio
import msgspec

from service.conversation import ToolCall
from service.dialects.responses_decode import CreateRequest, SteerRequest
from service.dialects.responses_entries import Cancelled
from service.dialects.responses_steer import SteerProblem, accepted, failed, pending
from service.events import Completed, Event, Failed, ToolCallStarted
from service.responses.turns import Turn
from service.transport.intake import Hold

_ENDS = (Completed, Failed)
MAX_STEERS = 16
"""That wait on one connection, for responses that run or for what their calls return."""


@dataclass(frozen=True, slots=True)
class Steer:
    """Accepted input, and the bytes it holds."""

    id: str
    asked: SteerRequest
    hold: Hold


@dataclass(slots=True, eq=False)
class RunningTurn:
    """A running response. `lock` keeps its frames in the order of their numbers; `steers` wait for
    its end, which they bring about unless it calls a tool."""

    turn: Turn
    stream_id: str | None
    steers: list[Steer] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    quiet: bool = False
    _calls: bool = False
    _ended: bool = False
    _waits: bool = False
    _reading: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def read(self, tell: Callable[[Event], Awaitable[None]]) -> None:
        """Tell what the response tells, until it has ended or has been steered away from."""
        untold: Event | None = None
        with self._reading:
            while (event := await self._next()) is not None:
                if self._reading.cancel_called:
                    untold = event
                    break
                await tell(event)
        if untold is not None:  # it came together with what the client added
            await tell(untold)

    async def _next(self) -> Event | None:
        if self.steered or self._ended:
            return None
        self._waits = True
        event = await anext(self.turn.events, None)
        self._waits = False
        if event is None or isinstance(event, _ENDS):
            self._ended = True
        elif isinstance(event, ToolCallStarted):
            self._calls = True
        return event

    @property
    def steered(self) -> bool:
        """Whether it ends here for what its client added: calls are not cut."""
        return bool(self.steers) and not self._calls and not self._ended

    @property
    def steerable(self) -> bool:
        """Whether it still takes in what its client adds."""
        return self.turn.encoder.started and not self._ended

    def add(self, steer: Steer) -> None:
        """Take in input, and stop waiting for more of an answer that nobody wants."""
        self.steers.append(steer)
        if self.steered and self._waits:
            self._waits = False
            self._reading.cancel()

    async def stop(self) -> Cancelled:
        """End the generation by the engine's next step; what is to be told of it."""
        await self.turn.events.aclose()
        self._ended = True
        return Cancelled(self.turn.record.usage, steered=True)


class Steering:
    """The steering of one connection: `put` sends a frame to its client."""

    def __init__(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        self.running: set[RunningTurn] = set()
        self._put = put
        self._pending: dict[str, list[Steer]] = {}
        self._holds: set[Hold] = set()
        self._num_frames = 0

    @property
    def num_steers(self) -> int:
        """How many wait."""
        running = sum(len(each.steers) for each in self.running)
        return running + sum(map(len, self._pending.values()))

    async def receive(self, asked: SteerRequest, hold: Hold, ended: bool) -> bool:
        """Queue input for a response, or give it back; whether it is queued, and holds its bytes.

        ended: the response that it names was one of this client's.
        """
        target = next(
            (each for each in self.running if each.turn.stored.id == asked.previous_response_id),
            None,
        )
        problem = self._problem(asked, target, ended)
        if problem is not None or target is None:
            await self._fail(problem or "response_not_found", asked, None, target)
            return False
        steer = Steer(f"steer_{secrets.token_hex(12)}", asked, hold)
        frame = accepted(steer.id, asked, self._next_number(), target.stream_id)
        await self._put(frame)
        if target.steerable:
            target.add(steer)
            self._holds.add(hold)
            return True
        await self._fail("response_already_completed", asked, steer.id, target)
        return False

    async def settle(self, ended: RunningTurn) -> bool:
        """What becomes of the input of a response that has ended: whether a successor is to read
        it. Else it waits for what the calls return, or is given back."""
        stored = ended.turn.stored
        if not ended.steers:
            return False
        if stored.status not in ("completed", "incomplete"):
            await self.give_back(ended, "response_not_active")
            return False
        calls = () if stored.final is None else stored.final.tool_calls
        if not calls:
            return True
        self._pending[stored.id] = ended.steers
        for steer in ended.steers:
            await self._put(self._pending_frame(steer, calls, ended))
        return False

    async def give_back(self, ended: RunningTurn, problem: SteerProblem) -> None:
        """Return all input of a response to its client."""
        for steer in ended.steers:
            await self._fail(problem, steer.asked, steer.id, ended)
        self._release(ended.steers)

    def waiting(self, previous_response_id: str | None) -> list[Steer]:
        """What waits for a client's continuation of a response."""
        return self._pending.get(previous_response_id or "", [])

    def commit(self, steers: list[Steer], previous_response_id: str | None) -> None:
        """A response that reads them has begun."""
        self._release(steers)
        self._pending.pop(previous_response_id or "", None)

    def discard(self) -> None:
        """The connection has ended, and with it what waited."""
        for hold in self._holds:
            hold.release()

    def _problem(
        self, asked: SteerRequest, target: RunningTurn | None, ended: bool
    ) -> SteerProblem | None:
        if asked.fault:
            return "invalid_input"
        if target is None:
            return "response_already_completed" if ended else "response_not_found"
        if not target.steerable:
            return "response_already_completed"
        if not target.turn.stored.generates:
            return "steering_not_supported"
        return "too_many_pending_steers" if self.num_steers >= MAX_STEERS else None

    def _pending_frame(
        self, steer: Steer, calls: tuple[ToolCall, ...], ended: RunningTurn
    ) -> bytes:
        return pending(steer.id, steer.asked, calls, self._next_number(), ended.stream_id)

    async def _fail(
        self,
        problem: SteerProblem,
        asked: SteerRequest,
        steer_id: str | None,
        target: RunningTurn | None,
    ) -> None:
        lane = None if target is None else target.stream_id
        await self._put(failed(problem, asked, steer_id, self._next_number(), lane))

    def _release(self, steers: list[Steer]) -> None:
        for steer in steers:
            self._holds.remove(steer.hold)
            steer.hold.release()

    def _next_number(self) -> int:
        number = self._num_frames
        self._num_frames += 1
        return number


def prepended(steers: list[Steer], request: CreateRequest) -> CreateRequest:
    """A client's own continuation, with what waits for it before its input."""
    added = tuple(message for steer in steers for message in steer.asked.messages)
    if not added:
        return request
    num_kept = request.num_kept and len(added) + request.num_kept
    return replace(request, input=(*added, *request.input), num_kept=num_kept)


def successor(ended: RunningTurn, request: CreateRequest) -> CreateRequest:
    """The continuation that nobody sent: with the settings of what it continues."""
    body = msgspec.structs.replace(request.body, previous_response_id=ended.turn.stored.id)
    return prepended(ended.steers, replace(request, body=body, input=(), num_kept=0))

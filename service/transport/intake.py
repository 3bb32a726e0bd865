"""`Intake`: how many bytes of requests the server holds at a time, over all connections.

What a request brought is held until it is answered, as its text lives on in what was decoded.
"""

import time

import anyio
from starlette.types import Message, Receive

from service.config import Limits
from service.errors import ApiError, overloaded

RESERVE = 4
"""One part in so many is added to the bound for small requests, which are decoded on the event
loop, so that a few large ones cannot shut them out; and for what must be read to be refused."""


class Intake:
    """The bound. Used from one event loop only."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_bytes = 0

    def fits(self, added: int, *, reserve: bool) -> bool:
        """Whether there is room for `added` more."""
        room = self.limits.request_bytes
        if reserve:
            room += room // RESERVE
        return self.num_bytes + added <= room


class Hold:
    """What one request, or one connection's unread messages, hold."""

    def __init__(self, intake: Intake, *, reserve: bool = False) -> None:
        """`reserve`: the reserve is open to it also when it is large."""
        self._intake = intake
        self._reserve = reserve
        self.num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Hold so many bytes from now on. Raises ApiError 503 if there is no room for more; then
        nothing has changed."""
        added = num_bytes - self.num_bytes
        reserve = self._reserve or num_bytes <= self._intake.limits.offload_bytes
        if added > 0 and not self._intake.fits(added, reserve=reserve):
            raise overloaded("The server holds as many bytes of requests as it may.")
        self._intake.num_bytes += added
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing."""
        self.set(0)


class TimedBody:
    """A request's `receive` whose body is counted in a hold and must keep coming."""

    def __init__(self, receive: Receive, hold: Hold, limits: Limits) -> None:
        self._receive = receive
        self._hold = hold
        self._silence_s = limits.body_silence_s
        self._end_s = time.monotonic() + limits.body_s
        self._whole = False

    async def __call__(self) -> Message:
        """Raises ApiError: 408 for a body that stopped, 503 if there is no room for it."""
        if self._whole:
            return await self._receive()
        patience_s = min(self._silence_s, self._end_s - time.monotonic())
        message: Message | None = None
        with anyio.move_on_after(patience_s):
            message = await self._receive()
        if message is None:
            raise ApiError(
                408,
                "The body did not arrive in time.",
                code="timeout",
                headers={"connection": "close"},
            )
        if message["type"] == "http.request":
            self._hold.set(self._hold.num_bytes + len(message.get("body", b"")))
            self._whole = not message.get("more_body", False)
        return message

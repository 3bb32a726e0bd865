"""The events of one request on the edge's side: what arrives, and the iterator that reads it."""

import asyncio
from collections import deque
from typing import Protocol

from engine.types import EngineEvent, EngineRequest, Finished, FinishReason, Started, TokenDelta


class Border(Protocol):
    """What a stream tells the engine."""

    def grant(self, request_id: str, credits: int) -> None:
        """The reader has read that many tokens more."""

    def abort(self, request_id: str) -> None:
        """End the request; ended ones and second calls are ignored."""

    def abandon(self, channel: "Channel") -> None:
        """`Channel.close` soon, on the event loop; called from any thread."""


class Channel:
    """An open request: its unread events, never more tokens than its credits.

    Touched from the event loop only. It lives until the engine's Finished arrives, also when its
    reader is gone.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request_id = request.id
        self.events: deque[EngineEvent] = deque()
        self.reader: asyncio.Future[None] | None = None
        self.closed = False
        self.ended = False
        self.abort_sent = False
        self.grant_at = max(1, request.credits // 2)
        self.num_read = 0
        self._num_prompt_tokens = len(request.token_ids) // 4
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    def push(self, event: EngineEvent) -> None:
        """Take an event for the reader; without one it is dropped."""
        if isinstance(event, TokenDelta):
            self._num_output_tokens += len(event.token_ids) // 4
        elif isinstance(event, Started):
            self._num_prompt_tokens = event.num_prompt_tokens
            self._num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Finished):
            self.ended = True
        if self.closed:
            return
        self.events.append(event)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def fail(self, message: str, time_ns: int) -> None:
        """End in the engine's place, with what it had told so far."""
        self.push(
            Finished(
                self.request_id,
                FinishReason.ERROR,
                self._num_prompt_tokens,
                self._num_cached_tokens,
                self._num_output_tokens,
                time_ns,
                message=message,
                retryable=True,
            )
        )

    def close(self) -> None:
        """Drop what is unread and what is still to come."""
        self.closed = True
        self.events.clear()
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class EventStream:
    """The async iterator that `Engine.generate` returns; one task reads it.

    Cancelling a read aborts the request; who reads on gets its last events and its Finished.
    `aclose`, or dropping the iterator, aborts it and discards them.
    """

    def __init__(self, border: Border, channel: Channel) -> None:
        self._border = border
        self._channel = channel
        self._exhausted = False

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> EngineEvent:
        channel = self._channel
        while not channel.events:
            if self._exhausted or channel.closed:
                raise StopAsyncIteration
            await self._wait(channel)
        return self._take(channel)

    def ready(self) -> list[EngineEvent]:
        """See `engine.api.EventStream.ready`."""
        channel = self._channel
        if not channel.events:
            return []
        return [self._take(channel) for _ in range(len(channel.events))]

    def _take(self, channel: Channel) -> EngineEvent:
        event = channel.events.popleft()
        if isinstance(event, TokenDelta):
            self._return_credits(channel, len(event.token_ids) // 4)
        elif isinstance(event, Finished):
            self._exhausted = True
        return event

    async def aclose(self) -> None:
        """Abort the request if it runs, and end the iterator. Awaits nothing."""
        self._channel.close()
        self._abort()

    def __del__(self) -> None:
        if not self._channel.closed and not self._channel.ended:
            self._border.abandon(self._channel)

    def _abort(self) -> None:
        """An ended request is left alone: its id may be that of a later one by now."""
        if not self._channel.ended:
            self._border.abort(self._channel.request_id)

    async def _wait(self, channel: Channel) -> None:
        """Until there is an event or the channel is closed."""
        if channel.reader is not None:
            raise RuntimeError("the events of a request are read by one task")
        channel.reader = asyncio.get_running_loop().create_future()
        try:
            await channel.reader
        except asyncio.CancelledError:
            self._abort()
            raise
        finally:
            channel.reader = None

    def _return_credits(self, channel: Channel, num_tokens: int) -> None:
        """Half of the credits at a time: messages stay few and the engine never runs dry."""
        channel.num_read += num_tokens
        if channel.num_read >= channel.grant_at and not channel.ended and not channel.abort_sent:
            self._border.grant(channel.request_id, channel.num_read)
            channel.num_read = 0

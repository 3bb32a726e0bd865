"""`EngineClient`: the edge's end of the border, the same for an engine process and a thread."""

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from typing import Literal, Protocol, TypeAlias

import msgspec

from engine.api import (
    EngineDead,
    EngineError,
    EngineHealth,
    EngineSilent,
    RequestRefused,
)
from engine.limits import check_request
from engine.overload import Backlog, QueueBounds
from engine.stats import EngineStats, PoolStats
from engine.transport.cache_watch import CacheWatchers
from engine.transport.stream import Channel, EventStream
from engine.types import (
    CacheCall,
    CacheEventInfo,
    CacheReport,
    EngineInfo,
    EngineRequest,
    ExplainPrompt,
    ExtendLease,
    Finished,
    LeaseInfo,
    ListLeases,
    Prompt,
    ReleaseLease,
    Started,
)
from engine.views import EngineView, NodeView
from engine.wire.frames import FrameError, FrameReader, FrameSender
from engine.wire.messages import (
    Abort,
    Add,
    Ask,
    AskAudit,
    AskCache,
    AskFlush,
    AskNode,
    AskStats,
    AskView,
    AuditReply,
    CallFailed,
    Close,
    Command,
    Drain,
    FlushReply,
    FromEngine,
    Grant,
    LeasesReply,
    NodeReply,
    Ready,
    Reply,
    ReportReply,
    StartFailed,
    StatsReply,
    StepMessage,
    ViewReply,
    WatchCache,
    decode_from_engine,
    encode,
)

CLOSE_S = 5.0
"""How long an engine may take to end after it was asked to, before it is killed."""
ABORT_S = 2.0
"""The same for one that drained, and whose grace is over: its requests wait for their ends."""
KILLED_S = 5.0
"""How long the end of a killed engine may take to be seen; then it counts as ended."""
ANSWER_S = 1.5
"""How long a question to the engine may wait for the step under way."""
AUDIT_S = 60.0

SHUTTING_DOWN = (
    "The server is draining, it is shutting down and takes no new requests: repeat the request."
)

_log = logging.getLogger(__name__)


class Peer(Protocol):
    """Where the engine runs."""

    @property
    def pid(self) -> int | None:
        """The engine's process, if it has one of its own."""

    def kill(self) -> None:
        """End it at once, as far as it can be; callable when it has ended."""

    def reap(self, timeout_s: float) -> str:
        """Block until it has ended, at most `timeout_s`, then kill; says how it ended."""


LastWords: TypeAlias = Callable[[str], str]
"""Called once, when an engine ends that should not have, with the reason; returns what its
requests and the log are told."""


class EngineClient:
    """An `Engine` behind a socket. `start` has to succeed before anything else is called.

    It lives on the event loop that it was made on: what comes with a step is delivered at once, to
    all streams.
    """

    def __init__(
        self, sock: socket.socket, peer: Peer, bounds: QueueBounds, last_words: LastWords = str
    ) -> None:
        self._last_words = last_words
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._peer = peer
        self._backlog = Backlog(bounds)
        self._loop = asyncio.get_running_loop()
        self._sender = FrameSender(sock)
        self._writing = False
        self._watchers = CacheWatchers(lambda on: self._send(WatchCache(on)))
        self._channels: dict[str, Channel] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count()
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._ending = False
        self._end_reason = ""
        self._heard_ns = time.monotonic_ns()
        self._reaping: asyncio.Task[None] | None = None

    async def start(self, first_payload: bytes | None = None, limit_s: float | None = None) -> None:
        """Wait until the engine stands, at most so long. Raises EngineError with a sentence, the
        engine's own if it has one, if it does not; cancelled or failed, it leaves nothing
        running."""
        self._loop.add_reader(self._socket, self._on_readable)
        if first_payload is not None:
            self._push(first_payload)
        try:
            await asyncio.wait([self._started], timeout=limit_s)
            if not self._started.done():
                self.kill(
                    f"the engine still loaded the model after {limit_s:g} s (--step-limit) and was "
                    "killed"
                )
            await self._started
        except asyncio.CancelledError:
            self._started.cancel()
            self._peer.kill()
            await self.close()
            raise
        except EngineError:
            await self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._started.result()

    @property
    def alive(self) -> bool:
        return not (self._closing or self._ending or self._ended.done())

    @property
    def health(self) -> EngineHealth:
        """Without a supervisor nobody asks an idle engine for a sign of life."""
        silent_s = (time.monotonic_ns() - self._heard_ns) / 1e9
        if self.alive:
            return EngineHealth(state="running", silent_s=silent_s)
        reason = self._end_reason or SHUTTING_DOWN
        expected = self._closing and not self._ended.done()
        state: Literal["draining", "ended"] = "draining" if expected else "ended"
        return EngineHealth(state=state, silent_s=silent_s, reason=reason)

    @property
    def _has_started(self) -> bool:
        started = self._started
        return started.done() and not started.cancelled() and started.exception() is None

    @property
    def heard_ns(self) -> int:
        """When anything was read from the engine last."""
        return self._heard_ns

    def ask_for_sign(self) -> None:
        """Make the engine say something after the step under way."""
        self._send(AskStats(next(self._call_ids)))

    async def wait_ended(self, timeout_s: float) -> bool:
        """Whether the engine has ended within `timeout_s`, with all its requests told."""
        await asyncio.wait([self._ended], timeout=timeout_s)
        return self._ended.done()

    def kill(self, reason: str) -> None:
        """End the engine at once; `reason` is why it ended."""
        self._end_reason = self._end_reason or reason
        self._peer.kill()

    @property
    def pid(self) -> int | None:
        """The engine's process; None for a thread."""
        return self._peer.pid

    @property
    def num_open(self) -> int:
        """Requests whose Finished has not arrived."""
        return len(self._channels)

    def generate(self, request: EngineRequest) -> EventStream:
        """See `Engine.generate`. The id of an open request is refused."""
        if not self.alive:
            raise EngineDead(self._end_reason or SHUTTING_DOWN)
        if request.id in self._channels:
            raise RequestRefused(f"a request with the id {request.id!r} is running", "id")
        check_request(request, self.info)
        self._backlog.admit(request, len(self._channels))
        try:
            self._send(Add(request))
        except FrameError as error:
            self._backlog.end(request.id)
            raise RequestRefused(str(error), "token_ids") from error
        channel = self._channels[request.id] = Channel(request)
        return EventStream(self, channel)

    def check_load(self, prompt: Prompt) -> None:
        if not self.alive:
            raise EngineDead(self._end_reason or SHUTTING_DOWN)
        self._backlog.check(prompt, len(self._channels))

    def abort(self, request_id: str) -> None:
        channel = self._channels.get(request_id)
        if channel is not None and not channel.abort_sent:
            channel.abort_sent = True
            self._send(Abort(request_id))

    def grant(self, request_id: str, credits: int) -> None:
        """Return credits of an open request; the streams call it."""
        self._send(Grant(request_id, credits))

    def abandon(self, channel: Channel) -> None:
        """A stream was dropped unread, on any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._drop, channel)

    def _drop(self, channel: Channel) -> None:
        channel.close()
        if not channel.ended:
            self.abort(channel.request_id)

    async def stats(self) -> EngineStats:
        reply = await self._ask(AskStats)
        assert isinstance(reply, StatsReply)
        return reply.stats

    async def flush(self) -> int:
        reply = await self._ask(AskFlush)
        assert isinstance(reply, FlushReply)
        return reply.num_pages

    async def audit(self) -> PoolStats:
        reply = await self._ask(AskAudit, AUDIT_S)
        assert isinstance(reply, AuditReply)
        return reply.pool

    async def explain(self, prompt: ExplainPrompt) -> CacheReport:
        reply = await self._ask_cache(prompt)
        assert isinstance(reply, ReportReply)
        return reply.report

    async def leases(self, call: ListLeases | ExtendLease | ReleaseLease) -> tuple[LeaseInfo, ...]:
        reply = await self._ask_cache(call)
        assert isinstance(reply, LeasesReply)
        return reply.leases

    def cache_events(self) -> AsyncGenerator[CacheEventInfo, None]:
        """See `Engine.cache_events`."""
        return self._watchers.listen()

    async def view(self, *, tree: bool) -> EngineView:
        reply = await self._ask(lambda call_id: AskView(call_id, tree))
        assert isinstance(reply, ViewReply)
        return reply.view

    async def read_node(self, page: int) -> NodeView | None:
        reply = await self._ask(lambda call_id: AskNode(call_id, page))
        assert isinstance(reply, NodeReply)
        return reply.node

    async def _ask_cache(self, call: CacheCall) -> Reply:
        return await self._ask(lambda call_id: AskCache(call_id, call))

    async def drain(self, grace_s: float) -> None:
        self._closing = True
        self._send(Drain())
        await asyncio.wait([self._ended], timeout=grace_s)
        for request_id in list(self._channels):
            self.abort(request_id)
        if not await self.wait_ended(ABORT_S):
            self.kill(SHUTTING_DOWN)
            await self._wait_killed()

    async def close(self) -> None:
        """See `Engine.close`. Cancelled, it kills the engine at once."""
        self._closing = True
        self._send(Close())
        try:
            await asyncio.wait([self._ended], timeout=CLOSE_S)
            if not self._ended.done():
                self._peer.kill()
                await self._wait_killed()
        except asyncio.CancelledError:
            self._peer.kill()
            raise

    async def _wait_killed(self) -> None:
        """Wait for the end of an engine that was killed; no longer than a sane machine needs, as
        every way out of the server leads through here."""
        if not await self.wait_ended(KILLED_S):
            _log.error("the engine was killed and has not ended %g s later", KILLED_S)
            self._loop.remove_reader(self._socket)
            self._on_end("the engine was killed and its end was not seen")

    async def _ask(self, ask: Callable[[int], Ask], timeout_s: float = ANSWER_S) -> Reply:
        if self._ended.done():
            raise EngineDead(self._end_reason)
        call_id = next(self._call_ids)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[call_id] = future
        self._send(ask(call_id))
        try:
            async with asyncio.timeout(timeout_s):
                reply: Reply = await future
        except TimeoutError:
            raise EngineSilent(
                f"the engine has not answered within {timeout_s:g} s; it was last heard of "
                f"{self.health.silent_s:.1f} s ago"
            ) from None
        finally:
            self._calls.pop(call_id, None)
        if isinstance(reply, CallFailed):
            raise EngineError(reply.message)
        return reply

    def _send(self, command: Command) -> None:
        """Raises FrameError for a command that is too long, with nothing sent."""
        self._push(encode(command))

    def _push(self, payload: bytes) -> None:
        if self._ended.done():
            return
        self._sender.push(payload)
        if self._sender.num_pending_bytes and not self._writing:
            self._writing = True
            # It writes for all requests: what it logs is not this one's.
            Context().run(self._loop.add_writer, self._socket, self._on_writable)

    def _on_writable(self) -> None:
        self._sender.flush()
        if not self._sender.num_pending_bytes:
            self._writing = False
            self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        """Deliver all that has come; at the end, learn how the engine ended.

        All: an engine that ends with something of ours unread leaves an error on the socket, and
        of that uvloop tells once and then watches no more. Whoever leaves the end unread misses it.
        """
        ended = False
        while not ended:
            try:
                payloads = self._reader.receive(self._socket)
            except BlockingIOError:
                return
            except OSError:  # the socket broke
                payloads = None
            self._heard_ns = time.monotonic_ns()
            try:
                for payload in payloads or ():
                    self._deliver(decode_from_engine(payload))
            except (FrameError, msgspec.MsgspecError):
                _log.exception("the engine's messages cannot be read")
                self._peer.kill()
                payloads = None
            ended = payloads is None
        self._loop.remove_reader(self._socket)
        self._reaping = self._loop.create_task(self._reap())

    async def _reap(self) -> None:
        self._on_end(await asyncio.to_thread(self._peer.reap, CLOSE_S))

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case StepMessage(events, replies, ending, cache_events, load):
                self._backlog.load = load
                self._ending = self._ending or ending
                self._watchers.deliver(cache_events)
                for event in events:
                    channel = self._channels.get(event.request_id)
                    if channel is None:
                        continue
                    if isinstance(event, Started):
                        self._backlog.start(event)
                    elif isinstance(event, Finished):
                        self._backlog.end(event.request_id)
                        del self._channels[event.request_id]
                    channel.push(event)
                for reply in replies:
                    future = self._calls.get(reply.call_id)
                    if future is not None and not future.done():
                        future.set_result(reply)
            case Ready(info, load):
                self._backlog.load = load
                if not self._started.done():
                    self._started.set_result(info)
            case StartFailed(sentence):
                if not self._started.done():
                    self._started.set_exception(EngineError(sentence))

    def _on_end(self, reason: str) -> None:
        if self._ended.done():
            return
        reason = self._end_reason or reason
        if self._has_started and not self._closing:
            reason = self._last_words(reason)
            _log.error("%s", reason)
        self._end_reason = reason
        if self._writing:
            self._loop.remove_writer(self._socket)
        self._ended.set_result(None)
        self._socket.close()
        if not self._started.done():
            self._started.set_exception(EngineError(f"{reason} before it was ready"))
        self._watchers.end()
        now_ns = time.monotonic_ns()
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.fail(f"{reason}; the request may be repeated", now_ns)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

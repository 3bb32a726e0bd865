"""The step loop: drains its inbox, steps the core, sends one message of all that happened.

The loop owns law 3 (exactly one terminal event per request): it keeps the requests that are open,
lets nothing through for one that has ended, and ends all of them itself if the core fails.
"""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from engine.api import EngineError
from engine.core import Core
from engine.types import (
    CacheCall,
    CacheReport,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenDelta,
)
from engine.wire.frames import FrameError, FrameReader, FrameSender
from engine.wire.messages import (
    Abort,
    Add,
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
    decode_command,
    encode,
)

_MAX_RECVS_PER_STEP = 64
_LAST_WORDS_S = 2.0
"""How long the ending loop waits for the edge to take its last messages."""

_SHUTTING_DOWN = (
    "The server is draining, it is shutting down, before the request could run: repeat it."
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """What the loop must know of a request to end it in the core's place."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    started: bool = False
    trace_id: str = ""


class StepLoop:
    """Drives one core for one edge, on one thread. Only `drain` may be called from elsewhere."""

    def __init__(self, core: Core, sock: socket.socket) -> None:
        self._core = core
        self._socket = sock
        self._reader = FrameReader()
        self._sender = FrameSender(sock)
        self._open: dict[str, _Open] = {}
        self._events: list[EngineEvent] = []
        self._unread: list[Iterable[EngineEvent]] = []
        self._replies: list[Reply] = []
        self._drain_asked = False
        self._ending = False
        self._ending_told = False
        self._drained = False
        self._closed = False
        self._refusing = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(self._socket, select.POLLIN)
        self._watches_room = False

    def drain(self) -> None:
        """Take no more requests, end when the running ones have ended. Safe in a signal handler."""
        self._drain_asked = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def run(self) -> None:
        """Runs until closed, drained, or the edge is gone; closes core and socket. What escapes
        from the core is raised after every open request was told of it."""
        try:
            self._sender.push(encode(Ready(self._core.info, self._core.load)))
            while self._receive():
                self._step()
                if self._refusing:
                    self._refuse_waiting()
                if self._ending and not self._open:
                    self._drained = not self._closed
                    break
            self._send()
        except Exception as error:
            self._ending = True
            with contextlib.suppress(Exception):
                self._read()
            for request_id in list(self._open):
                message = (
                    f"the engine failed ({error}) and has stopped; the request may be repeated"
                )
                _tell_failed(request_id, message, self._open[request_id])
                self._end(request_id, message, retryable=True)
            self._send()
            raise
        finally:
            try:
                self._flush_last_words()
                if self._drained:
                    self._core.save()
                self._core.close()
            finally:
                for each in (self._poll, self._socket, self._wake, self._waker):
                    each.close()

    def _receive(self) -> bool:
        """Take what has arrived; blocks only when idle. False when the edge is gone."""
        idle_ms = self._idle_ms()
        if idle_ms != 0:
            self._send()
        self._watch_for_room()
        arrived = self._poll.poll(idle_ms if idle_ms is None else idle_ms / 1e3)
        if not arrived and not self._drain_asked:
            return True
        ready = dict(arrived)
        if self._wake.fileno() in ready:
            self._wake.recv(64)
        if self._drain_asked and not self._ending:
            self._begin_drain()
        flags = ready.get(self._socket.fileno(), 0)
        if flags & select.POLLOUT:
            self._sender.flush()
        return not flags & ~select.POLLOUT or self._read_commands()

    def _watch_for_room(self) -> None:
        """Have the poll say when the socket takes more, while something waits for that."""
        waits = self._sender.num_pending_bytes > 0
        if waits != self._watches_room:
            self._watches_room = waits
            pending = select.POLLOUT if waits else 0
            self._poll.modify(self._socket, select.POLLIN | pending)

    def _idle_ms(self) -> float | None:
        """How long there is nothing to do but wait; None is until something arrives."""
        if self._core.has_work:
            return 0
        wake_ns = self._core.wake_ns
        return max(0.0, (wake_ns - time.monotonic_ns()) / 1e6) if wake_ns else None

    def _read_commands(self) -> bool:
        for _ in range(_MAX_RECVS_PER_STEP):
            try:
                payloads = self._reader.receive(self._socket)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if payloads is None:
                return False
            for payload in payloads:
                try:
                    command = decode_command(payload)
                except msgspec.MsgspecError as error:
                    raise FrameError(f"a message that is no command: {error}") from error
                self._obey(command)
        return True

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self._core.abort(request_id)
            case Grant(request_id, credits):
                self._core.grant(request_id, credits)
            case AskStats(call_id):
                self._answer(call_id, lambda: StatsReply(call_id, self._core.stats()))
            case AskFlush(call_id):
                self._answer(call_id, lambda: FlushReply(call_id, self._core.flush()))
            case AskAudit(call_id):
                self._answer(call_id, lambda: AuditReply(call_id, self._core.audit()))
            case AskCache(call_id, call):
                self._answer(call_id, lambda: self._ask_cache(call_id, call))
            case WatchCache(on):
                self._core.watch_cache(on)
            case AskView(call_id, tree):
                self._answer(call_id, lambda: ViewReply(call_id, self._core.view(tree=tree)))
            case AskNode(call_id, page):
                self._answer(call_id, lambda: NodeReply(call_id, self._core.read_node(page)))
            case Drain():
                self._begin_drain()
            case Close():
                self._ending = self._closed = True
                for request_id in self._open:
                    self._core.abort(request_id)
            case _:
                assert_never(command)

    def _add(self, request: EngineRequest) -> None:
        if request.id in self._open:
            raise FrameError(f"request {request.id!r} is open already")
        self._open[request.id] = _Open(len(request.token_ids) // 4, trace_id=request.trace_id)
        if self._ending:
            self._end(request.id, _SHUTTING_DOWN, retryable=True)
            return
        try:
            self._core.add(request)
        except Exception as error:
            _log.exception("request %s was not taken trace=%s", request.id, request.trace_id)
            self._end(request.id, f"the engine failed to take the request: {error}")

    def _answer(self, call_id: int, ask: Callable[[], Reply]) -> None:
        try:
            self._replies.append(ask())
        except Exception as error:
            if not isinstance(error, EngineError):
                _log.exception("a call to the engine failed")
            self._replies.append(CallFailed(call_id, str(error) or type(error).__name__))

    def _ask_cache(self, call_id: int, call: CacheCall) -> Reply:
        answer = self._core.ask_cache(call)
        if isinstance(answer, CacheReport):
            return ReportReply(call_id, answer)
        return LeasesReply(call_id, answer)

    def _begin_drain(self) -> None:
        """Take no more. What came before it has one more step to start in: its client may have
        been told already that it was taken."""
        self._ending = self._refusing = True

    def _refuse_waiting(self) -> None:
        """Requests that have still not started are refused as if they came now."""
        self._refusing = False
        for request_id in [name for name, state in self._open.items() if not state.started]:
            self._core.abort(request_id)
            self._end(request_id, _SHUTTING_DOWN, retryable=True)

    def _step(self) -> None:
        """What it says is sent while the next one computes, or at once if there is nothing more
        to compute."""
        if self._core.has_work or 0 < self._core.wake_ns <= time.monotonic_ns():
            events = self._core.step(self._send)  # what is unread meanwhile is read there
            self._unread.append(events)
        if self._ending:  # its last end may be among what is unread, and nothing more may come
            self._read()

    def _read(self) -> None:
        """Note the events of the steps since the last call, which have them made."""
        unread, self._unread = self._unread, []
        for events in unread:
            for event in events:
                self._note(event)

    def _note(self, event: EngineEvent) -> None:
        state = self._open.get(event.request_id)
        if state is None:
            return
        match event:
            case TokenDelta():
                state.num_output_tokens += len(event.token_ids) // 4
            case Started():
                state.started = True
                state.num_prompt_tokens = event.num_prompt_tokens
                state.num_cached_tokens = event.num_cached_tokens
            case PromptLogprobs():
                pass
            case Finished():
                del self._open[event.request_id]
                if event.reason is FinishReason.ERROR:
                    _tell_failed(event.request_id, event.message, state)
            case _:
                assert_never(event)
        self._events.append(event)

    def _end(self, request_id: str, message: str, *, retryable: bool = False) -> None:
        """End an open request in the core's place."""
        state = self._open.pop(request_id)
        self._events.append(
            Finished(
                request_id,
                FinishReason.ERROR,
                state.num_prompt_tokens,
                state.num_cached_tokens,
                state.num_output_tokens,
                time.monotonic_ns(),
                message=message,
                retryable=retryable,
            )
        )

    def _send(self) -> None:
        """One message for all events and replies since the last; a reply to a call that was read
        between two steps says what was so after the first one, whose events go with it. Never
        blocks; what waits for the socket is bounded by the credits of the open requests."""
        self._read()
        cache_events = self._core.take_cache_events()
        told = self._events or self._replies or cache_events
        if not told and self._ending == self._ending_told:
            return
        message = StepMessage(
            tuple(self._events), tuple(self._replies), self._ending, cache_events, self._core.load
        )
        self._ending_told = self._ending
        self._events.clear()
        self._replies.clear()
        self._sender.push(encode(message))

    def _flush_last_words(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        end_s = time.monotonic() + _LAST_WORDS_S
        while self._sender.num_pending_bytes and time.monotonic() < end_s:
            poll.poll(100)
            self._sender.flush()


def _tell_failed(request_id: str, why: str, state: _Open) -> None:
    _log.error("request %s failed: %s trace=%s", request_id, why, state.trace_id)


def serve(
    sock: socket.socket,
    make_core: Callable[[], Core],
    on_loop: Callable[[StepLoop], None] = lambda loop: None,
) -> bool:
    """Make the core, tell the edge what was made or why not, and run its loop to the end.

    `on_loop` is called with the loop before it runs. False if the core could not be made. Raises
    what escaped from a running core, after the edge was told.
    """
    try:
        core = make_core()
    except Exception as error:
        sentence = str(error) or type(error).__name__
        if type(error).__module__ == "builtins" and not isinstance(error, OSError | MemoryError):
            # Not an error class made for people: somebody has to look for the cause.
            _log.exception("the engine cannot start")
            sentence = f"{type(error).__name__}: {error}"
        FrameSender(sock).push(encode(StartFailed(sentence)))
        sock.close()
        return False
    loop = StepLoop(core, sock)
    on_loop(loop)
    loop.run()
    return True

"""Frames and messages: how a byte stream is cut, and what happens to one that is damaged."""

import logging
import random
import socket
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import Core
from engine.overload import QueueBounds
from engine.scripted import Script, ScriptedCore, ScriptStep, text_script
from engine.transport.client import EngineClient
from engine.transport.thread import ThreadPeer
from engine.types import EngineEvent, Finished, FinishReason, Started, TokenDelta
from engine.wire.frames import MAX_FRAME_BYTES, FrameError, FrameReader, FrameSender
from engine.wire.messages import (
    Abort,
    Add,
    AskStats,
    Close,
    Command,
    Drain,
    FromEngine,
    Grant,
    Ready,
    StepMessage,
    decode_command,
    decode_from_engine,
    encode,
)
from kernels.contract import do_nothing
from tests.engine.transport.playing import finished, read, request, text_of

PATIENCE_S = 20.0


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_cut_of_the_stream_gives_the_same_payloads(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(framed(payload) for payload in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    reader = FrameReader()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert got == payloads


def test_what_a_socket_has_is_read_into_memory_that_is_kept() -> None:
    """A buffer of its own for each read was mapped and unmapped at every token."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader()
        with pytest.raises(BlockingIOError):
            reader.receive(ours)
        theirs.sendall(framed(b"one") + framed(b"two") + framed(b"three")[:5])
        assert list(reader.receive(ours) or ()) == [b"one", b"two"]
        theirs.sendall(framed(b"three")[5:])
        tracemalloc.start()
        try:
            assert list(reader.receive(ours) or ()) == [b"three"]
            assert tracemalloc.get_traced_memory()[1] < 10_000
        finally:
            tracemalloc.stop()
        theirs.close()
        assert reader.receive(ours) is None


def test_an_oversized_frame_is_known_by_its_header() -> None:
    with pytest.raises(FrameError, match=str(MAX_FRAME_BYTES)):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def test_an_oversized_message_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        with pytest.raises(FrameError):
            sender.push(bytes(MAX_FRAME_BYTES + 1))
        sender.push(b"next")
        assert theirs.recv(100) == framed(b"next")


def test_sending_never_blocks_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        payloads = [bytes([number]) * 100_000 for number in range(20)]
        for payload in payloads:
            sender.push(payload)
        assert sender.num_pending_bytes > 0
        reader = FrameReader()
        got: list[bytes] = []
        while len(got) < len(payloads):
            got += reader.feed(theirs.recv(65536))
            sender.flush()
        assert got == payloads
        assert sender.num_pending_bytes == 0


def test_a_peer_that_is_gone_swallows_what_is_sent() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        sender = FrameSender(ours)
        sender.push(b"hello")
        assert sender.num_pending_bytes == 0


class Conversation:
    """A loop in a thread, spoken to in bytes."""

    def __init__(self, core: Core, first: bytes = b"") -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(PATIENCE_S)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.ours.sendall(first)
        self.peer = ThreadPeer(theirs, lambda: core)
        self._reader = FrameReader()
        self._said: deque[FromEngine] = deque()
        assert isinstance(self.next(), Ready)

    def next(self) -> FromEngine | None:
        """The next message; None at the end."""
        while not self._said:
            data = self.ours.recv(65536)
            if not data:
                return None
            self._said.extend(decode_from_engine(payload) for payload in self._reader.feed(data))
        return self._said.popleft()

    def hear(self) -> list[StepMessage]:
        """All that the loop still says; it must end."""
        steps = []
        while (message := self.next()) is not None:
            assert isinstance(message, StepMessage)
            steps.append(message)
        self.ours.close()
        assert self.peer.reap(PATIENCE_S) == "the engine thread ended"
        return steps


def commands(*listed: Command) -> bytes:
    return b"".join(framed(encode(command)) for command in listed)


def of_request(steps: list[StepMessage], name: str) -> list[EngineEvent]:
    return [event for step in steps for event in step.events if event.request_id == name]


def core() -> ScriptedCore:
    return ScriptedCore(lambda asked: text_script("abc"))


def test_one_message_tells_all_of_a_step() -> None:
    conversation = Conversation(core(), commands(Add(request("a")), Add(request("b"))))
    message = conversation.next()
    assert isinstance(message, StepMessage)
    kinds = [(event.request_id, type(event)) for event in message.events]
    assert kinds == [("a", Started), ("a", TokenDelta), ("b", Started), ("b", TokenDelta)]
    conversation.ours.sendall(commands(Drain()))
    steps = [message, *conversation.hear()]
    assert finished(of_request(steps, "a")).reason is FinishReason.STOP
    assert finished(of_request(steps, "b")).reason is FinishReason.STOP


def test_a_step_larger_than_the_socket_is_sent_whole() -> None:
    text = bytes(range(256)) * 2048
    core = ScriptedCore(lambda asked: Script((ScriptStep((65,), text=text),), finish=None))
    conversation = Conversation(core, commands(Add(request("a"))))
    message = conversation.next()
    assert isinstance(message, StepMessage)
    assert text_of(list(message.events)) == text
    conversation.ours.sendall(commands(Close()))
    events = of_request([message, *conversation.hear()], "a")
    assert finished(events).reason is FinishReason.ABORT


class _Full(ScriptedCore):
    """Has no room for anything."""

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[EngineEvent]:
        return []


def test_drain_refuses_what_has_not_started() -> None:
    """After smg-project/smg#1172: queued requests are told to come again."""
    full = _Full(lambda asked: text_script("abc", 3))
    steps = Conversation(full, commands(Add(request("queued")), Drain())).hear()
    end = finished(of_request(steps, "queued"))
    assert end.reason is FinishReason.ERROR
    assert end.retryable
    assert "draining" in end.message and "repeat it" in end.message


class _Computing(ScriptedCore):
    """Some of its steps compute until they are let go on."""

    def __init__(self, *long_steps: int) -> None:
        super().__init__(lambda asked: text_script("abc", 1))
        self.num_steps = 0
        self.begun = {step: threading.Event() for step in long_steps}
        self.go_on = {step: threading.Event() for step in long_steps}

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[EngineEvent]:
        self.num_steps += 1
        events = super().step(meanwhile)
        if self.num_steps in self.begun:
            self.begun[self.num_steps].set()
            assert self.go_on[self.num_steps].wait(PATIENCE_S)
        return events


def test_a_step_is_told_while_the_next_one_computes() -> None:
    computing = _Computing(2)
    conversation = Conversation(computing, commands(Add(request("a"))))
    message = conversation.next()
    assert isinstance(message, StepMessage)
    assert text_of(list(message.events)) == b"a"
    computing.go_on[2].set()
    conversation.ours.sendall(commands(Drain()))
    events = of_request([message, *conversation.hear()], "a")
    assert text_of(events) == b"abc"
    assert finished(events).reason is FinishReason.STOP


def test_a_call_is_answered_while_the_next_step_computes() -> None:
    """With the events of the step in which it came, if it came in one: they were so far."""
    computing = _Computing(1, 2)
    conversation = Conversation(computing, commands(Add(request("a")), AskStats(5)))
    before = conversation.next()
    assert isinstance(before, StepMessage)
    assert ([reply.call_id for reply in before.replies], before.events) == ([5], ())
    assert computing.begun[1].wait(PATIENCE_S)
    conversation.ours.sendall(commands(AskStats(6)))
    computing.go_on[1].set()
    during = conversation.next()
    assert isinstance(during, StepMessage)
    assert [reply.call_id for reply in during.replies] == [6]
    assert text_of(list(during.events)) == b"a"
    computing.go_on[2].set()
    conversation.ours.sendall(commands(Drain()))
    assert text_of(of_request([during, *conversation.hear()], "a")) == b"abc"


def test_requests_after_close_still_end_once() -> None:
    first = commands(Add(request("a")), Close(), Add(request("b")), Abort("b"), Grant("a", 3))
    steps = Conversation(core(), first).hear()
    assert finished(of_request(steps, "a")).reason is FinishReason.ABORT
    assert finished(of_request(steps, "b")).reason is FinishReason.ERROR


class _Talkative(ScriptedCore):
    """Ends its requests, then goes on about them."""

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[EngineEvent]:
        events = super().step(meanwhile)
        ends = [event for event in events if isinstance(event, Finished)]
        return [*events, *ends, *[Started(end.request_id, 1, 0, 1) for end in ends]]


def test_nothing_follows_the_terminal_event() -> None:
    talkative = _Talkative(lambda asked: text_script("abc", 3))
    conversation = Conversation(talkative, commands(Add(request("a"))))
    message = conversation.next()
    assert isinstance(message, StepMessage)
    conversation.ours.sendall(commands(Drain()))
    events = of_request([message, *conversation.hear()], "a")
    assert finished(events).reason is FinishReason.STOP


DAMAGE = {
    "oversized frame": (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    "not msgpack": framed(b"\xc1\xc1\xc1"),
    "empty message": framed(b""),
    "unknown command": framed(msgspec.msgpack.encode(["reboot"])),
    "wrong field": framed(msgspec.msgpack.encode(["grant", "a", -1])),
    "request that is open": commands(Add(request("a"))),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_stream_ends_every_request_and_the_loop(
    damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    endless = ScriptedCore(lambda asked: Script((ScriptStep((65,)),), repeat=True))
    with caplog.at_level(logging.CRITICAL):
        steps = Conversation(endless, commands(Add(request("a"))) + damage).hear()
    assert finished(of_request(steps, "a")).reason is FinishReason.ERROR


def test_fuzz_never_hangs_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Commands in any order, damaged or cut, then silence: the loop ends, no request ends twice."""
    rng = random.Random(5)
    names = ("the first request", "a second one")
    whole: list[Command] = [Abort(names[0]), Grant(names[1], 7), AskStats(1), Drain(), Close()]
    whole += [Add(request(name)) for name in names]
    with caplog.at_level(logging.CRITICAL):
        for _ in range(200):
            stream = bytearray(commands(*rng.sample(whole, rng.randint(1, 7))))
            for _ in range(rng.randint(0, 3)):
                stream[rng.randrange(len(stream))] = rng.randrange(256)
            conversation = Conversation(core(), bytes(stream[: rng.randint(1, len(stream))]))
            conversation.ours.shutdown(socket.SHUT_WR)
            events = [event for step in conversation.hear() for event in step.events]
            ended = [event.request_id for event in events if isinstance(event, Finished)]
            assert len(ended) == len(set(ended))


@pytest.mark.anyio
@pytest.mark.parametrize("border", ["thread"], indirect=True)
async def test_an_engine_that_talks_nonsense_is_ended(
    border: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The edge's side of the same: open requests end, nothing hangs."""
    ours, theirs = socket.socketpair()
    silent = ScriptedCore(lambda asked: Script(finish=None))
    engine = EngineClient(ours, ThreadPeer(theirs, lambda: silent), QueueBounds(4, 1 << 30))
    await engine.start()
    stream = engine.generate(request())
    answer = [await anext(stream)]
    with caplog.at_level(logging.CRITICAL):
        theirs.sendall(framed(b"\xc1"))
        answer += await read(stream)
    assert finished(answer).reason is FinishReason.ERROR
    assert not engine.alive
    await engine.close()


class _ByHand:
    """The engine's place, taken by the test."""

    pid = None

    def __init__(self, theirs: socket.socket) -> None:
        self.socket = theirs
        self._reader = FrameReader()

    def kill(self) -> None:
        self.socket.close()

    def reap(self, timeout_s: float) -> str:
        return "the test ended"

    def say(self, message: FromEngine) -> None:
        self.socket.sendall(framed(encode(message)))

    def heard(self) -> list[Command]:
        """What the edge has said by now."""
        payloads = self._reader.feed(self.socket.recv(65536))
        return [decode_command(payload) for payload in payloads]


@pytest.mark.anyio
@pytest.mark.parametrize("border", ["thread"], indirect=True)
async def test_an_abort_is_sent_once_and_none_after_the_end(border: str) -> None:
    ours, theirs = socket.socketpair()
    engine_side = _ByHand(theirs)
    client = EngineClient(ours, engine_side, QueueBounds(4, 1 << 30))
    engine_side.say(Ready(core().info))
    await client.start()
    running, ended = client.generate(request("running")), client.generate(request("ended"))
    engine_side.say(StepMessage((Finished("ended", FinishReason.STOP, 3, 0, 0, 1),)))
    finished(await read(ended))
    for stream in (running, ended):
        client.abort("running")
        client.abort("ended")
        await stream.aclose()
        await stream.aclose()
    del running, ended, stream
    await anyio.lowlevel.checkpoint()
    added = [Add(request("running")), Add(request("ended"))]
    assert engine_side.heard() == [*added, Abort("running")]
    engine_side.kill()
    await client.close()

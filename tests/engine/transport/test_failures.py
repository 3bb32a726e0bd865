"""When something breaks: every request still ends once, and no process or thread stays."""

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import anyio
import pytest

from engine.api import EngineDead, EngineError
from engine.scripted import Script, ScriptedCore, ScriptFile, ScriptStep
from engine.stats import PoolStats
from engine.transport import EngineClient, process, start_process_engine, start_thread_engine
from engine.types import EngineConfig, FinishReason, Started, TokenDelta
from engine.wire.frames import FrameReader, FrameSender
from engine.wire.messages import WIRE, StartFailed, decode_from_engine, encode
from tests.engine.transport.playing import Start, finished, read, request, spawn, tokens_of

pytestmark = pytest.mark.anyio

ENDLESS = Script((ScriptStep((65,)),), repeat=True)
CRASHING = Script((ScriptStep((65,)), ScriptStep(crash="page table torn")))

only_process = pytest.mark.parametrize("border", ["process"], indirect=True)
only_thread = pytest.mark.parametrize("border", ["thread"], indirect=True)


def gone(pid: int) -> bool:
    """Whether the process has ended within ten seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(10_000))
    finally:
        os.close(handle)


async def until_dead(engine: EngineClient) -> None:
    """Until the engine's end has been noticed."""
    with anyio.fail_after(20), pytest.raises(EngineDead):
        while True:
            await engine.stats()


async def test_a_fault_of_one_request_fails_it_alone(start: Start) -> None:
    broken = Script((ScriptStep((65,)), ScriptStep(error="logits are not finite")))
    whole = Script((ScriptStep((65,)), ScriptStep((66,))))
    engine = await start(ScriptFile(scripts=(broken, whole)))
    first, second = engine.generate(request("broken")), engine.generate(request("whole"))
    end = finished(await read(first))
    assert (end.reason, end.message) == (FinishReason.ERROR, "logits are not finite")
    assert finished(await read(second)).reason is FinishReason.STOP
    assert engine.alive


async def test_a_crash_ends_every_request_and_the_engine(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start(ScriptFile(scripts=(ENDLESS, ENDLESS, CRASHING)))
    running = [engine.generate(request(name, credits=2)) for name in "ab"]
    with caplog.at_level(logging.CRITICAL):
        end = finished(await read(engine.generate(request("c"))))
    assert not engine.alive
    with pytest.raises(EngineDead):
        engine.generate(request())
    assert end.reason is FinishReason.ERROR
    assert "page table torn" in end.message
    for stream in running:
        assert finished(await read(stream)).reason is FinishReason.ERROR
    await until_dead(engine)


@only_process
async def test_a_killed_engine_ends_every_request(start: Start) -> None:
    """Also of readers that wait, and of answers that are half read."""
    engine = await start(ScriptFile(scripts=(Script(finish=None), ENDLESS)))
    waiting = asyncio.ensure_future(read(engine.generate(request("waiting"))))
    half_read = engine.generate(request("half read", credits=4))
    answer = [await anext(half_read), await anext(half_read)]
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    answer += await read(half_read)
    for events in (answer, await waiting):
        end = finished(events)
        assert end.reason is FinishReason.ERROR
        assert "SIGKILL" in end.message
        assert "may be repeated" in end.message
        assert end.num_prompt_tokens == 3
    assert not engine.alive
    with pytest.raises(EngineDead, match="SIGKILL") as dead:
        engine.generate(request())
    assert dead.value.retryable
    with pytest.raises(EngineDead):
        await engine.stats()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


@only_process
async def test_calls_under_way_end_with_a_killed_engine(start: Start) -> None:
    engine = await start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    asking = asyncio.gather(engine.stats(), engine.audit(), return_exceptions=True)
    await anyio.lowlevel.checkpoint()
    os.kill(engine.pid, signal.SIGKILL)
    assert [type(answer) for answer in await asking] == [EngineDead, EngineDead]


@only_process
async def test_an_engine_killed_while_requests_wait_to_be_sent(start: Start) -> None:
    engine = await start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    streams = [engine.generate(request(f"r{n}", num_prompt=120_000)) for n in range(5)]
    os.kill(engine.pid, signal.SIGKILL)
    for stream in streams:
        assert finished(await read(stream)).reason is FinishReason.ERROR


PARENT = """
import asyncio
from engine.transport import start_process_engine
from engine.types import EngineConfig, EngineRequest, SamplingParams, pack_tokens

async def main():
    engine = await start_process_engine(EngineConfig(model="", backend="scripted"))
    request = EngineRequest("r", pack_tokens([7]), SamplingParams(100000))
    async for event in engine.generate(request):
        print(engine.pid, flush=True)

asyncio.run(main())
"""


@only_process
def test_an_engine_ends_with_its_parent(border: str) -> None:
    with spawn(PARENT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        assert gone(pid)


STUCK = """
import socket, sys, time
from engine.__main__ import _end_with_edge
edge = socket.socket(fileno=int(sys.argv[1]))
_end_with_edge(edge)
edge.send(b"x")
time.sleep(600)
"""


@only_process
def test_an_engine_ends_with_its_parent_also_in_a_long_step(border: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        stuck = spawn(STUCK, str(theirs.fileno()), fds=(theirs.fileno(),))
    with stuck:
        ours.recv(1)
        ours.close()
        assert stuck.wait(10) == 1


async def test_why_it_cannot_start_is_a_sentence(border: str) -> None:
    config = EngineConfig(model="/no/such/script.json", backend="scripted")
    sentence = "the script /no/such/script.json cannot be read: No such file or directory"

    def refuse() -> ScriptedCore:
        raise EngineError(sentence)

    with pytest.raises(EngineError) as failed:
        if border == "process":
            await start_process_engine(config)
        else:
            await start_thread_engine(refuse)
    assert str(failed.value) == sentence


@only_process
async def test_an_engine_that_dies_before_it_is_ready(
    border: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_spawn", lambda fd, module: spawn("raise SystemExit(3)"))
    with pytest.raises(EngineError, match="exit code 3 before it was ready"):
        await start_process_engine(EngineConfig(model="", backend="scripted"))


OTHER_CODE = """
import sys
import engine.wire.messages as messages
messages.WIRE = "of another day"
from engine.__main__ import main
sys.argv = ["engine", "--fd", sys.argv[1]]
raise SystemExit(main())
"""


@only_process
async def test_an_engine_of_other_code_says_so(
    border: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_spawn", lambda fd, module: spawn(OTHER_CODE, str(fd), fds=(fd,)))
    with pytest.raises(EngineError, match="another version than the server's"):
        await start_process_engine(EngineConfig(model="", backend="scripted"))


@only_process
async def test_a_greeting_from_other_code_is_answered(border: str) -> None:
    """Whatever it looks like."""
    for greeting in (b"", b"\xff", encode(["", "?"]), encode({"model": "m"}), encode([1, 2, 3])):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            engine = process._spawn(theirs.fileno(), "engine")
            theirs.close()
            FrameSender(ours).push(greeting)
            payloads = FrameReader().feed(ours.recv(1 << 16))
            answer = decode_from_engine(next(iter(payloads)))
            assert isinstance(answer, StartFailed)
            assert "another version" in answer.message
            assert engine.wait(20) == 1


def test_the_wire_has_one_name_in_every_process() -> None:
    code = "from engine.wire.messages import WIRE; print(WIRE)"
    with spawn(code, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.read().decode().strip() == WIRE


@only_process
async def test_a_cancelled_start_leaves_no_process(
    border: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[subprocess.Popen[bytes]] = []

    def never_ready(fd: int, module: str) -> "subprocess.Popen[bytes]":
        spawned.append(spawn("import time; time.sleep(600)", fds=(fd,)))
        return spawned[0]

    monkeypatch.setattr(process, "_spawn", never_ready)
    with anyio.move_on_after(0.05) as scope:
        await start_process_engine(EngineConfig(model="", backend="scripted"))
    assert scope.cancelled_caught
    assert gone(spawned[0].pid)
    assert spawned[0].wait() == -signal.SIGKILL


async def test_no_room_for_a_request_is_refused(border: str) -> None:
    with pytest.raises(EngineError, match="no room"):
        if border == "process":
            await start_process_engine(
                EngineConfig(model="", backend="scripted", max_running=0, max_waiting=0)
            )
        else:
            await start_thread_engine(lambda: ScriptedCore(lambda request: ENDLESS), max_open=0)


@only_process
async def test_interrupts_are_the_edges_business(start: Start) -> None:
    """Ctrl-C reaches the whole process group; the edge drains, so the engine goes on."""
    engine = await start(ScriptFile(num_tokens=50, delay_s=0.0))
    stream = engine.generate(request(credits=10))
    answer = [await anext(stream)]
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGINT)
    answer += await read(stream)
    assert finished(answer).reason is FinishReason.STOP
    assert (await engine.stats()).running == 0


@only_process
async def test_sigterm_lets_running_requests_finish(start: Start) -> None:
    """After vllm-project/vllm#24885: a signal to the whole group loses no work."""
    engine = await start(ScriptFile(num_tokens=50, delay_s=0.0))
    stream = engine.generate(request(credits=10))
    answer = [await anext(stream)]
    assert isinstance(answer[0], Started)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGTERM)
    with anyio.fail_after(20):
        while engine.alive:
            await engine.stats()
    answer += await read(stream)
    assert finished(answer).reason is FinishReason.STOP
    assert len(tokens_of(answer)) == 50
    await until_dead(engine)
    with pytest.raises(EngineDead, match="exit code 0"):
        engine.generate(request())


async def test_drain_lets_running_requests_finish(start: Start) -> None:
    engine = await start(ScriptFile(num_tokens=50, delay_s=0.0))
    stream = engine.generate(request(credits=10))
    answer = [await anext(stream)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.drain, 60.0)
        await anyio.lowlevel.checkpoint()
        assert not engine.alive
        with pytest.raises(EngineDead, match="shutting down"):
            engine.generate(request("late"))
        answer += await read(stream)
    assert finished(answer).reason is FinishReason.STOP
    assert engine.num_open == 0
    await engine.drain(60.0)


async def test_a_drain_does_not_refuse_what_came_just_before_it(start: Start) -> None:
    """Its client may have been told that it was taken, and would not ask again."""
    engine = await start(ScriptFile(num_tokens=5, delay_s=0.0))
    stream = engine.generate(request())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.drain, 60.0)
        answer = await read(stream)
    assert finished(answer).reason is FinishReason.STOP


async def test_drain_aborts_what_outlives_its_grace(start: Start) -> None:
    engine = await start(ScriptFile(scripts=(Script(finish=None),)))
    stream = engine.generate(request())
    answer = [await anext(stream)]
    await engine.drain(0.0)
    answer += await read(stream)
    assert finished(answer).reason is FinishReason.ABORT


async def test_close_aborts_what_runs_and_can_be_called_again(start: Start) -> None:
    engine = await start(ScriptFile(scripts=(ENDLESS,)))
    stream = engine.generate(request(credits=3))
    answer = [await anext(stream)]
    await asyncio.gather(engine.close(), engine.close())
    await engine.close()
    answer += await read(stream)
    assert finished(answer).reason is FinishReason.ABORT
    if engine.pid is not None:
        with pytest.raises(ProcessLookupError):
            os.kill(engine.pid, 0)


@only_process
async def test_close_kills_an_engine_that_does_not_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transport.client.CLOSE_S", 0.05)
    engine = await start(ScriptFile(scripts=(ENDLESS,)))
    stream = engine.generate(request(credits=3))
    answer = [await anext(stream)]
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    await engine.close()
    answer += await read(stream)
    assert finished(answer).reason is FinishReason.ERROR
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


class _WrongBooks(ScriptedCore):
    def audit(self) -> PoolStats:
        raise EngineError("page 7 is referenced by nobody")


@only_thread
async def test_an_audit_that_finds_something_says_what(border: str) -> None:
    engine = await start_thread_engine(lambda: _WrongBooks(lambda request: ENDLESS))
    with pytest.raises(EngineError, match="page 7 is referenced by nobody"):
        await engine.audit()
    assert engine.alive
    await engine.close()


@only_thread
async def test_a_core_that_does_not_take_a_request_fails_it_alone(
    border: str, caplog: pytest.LogCaptureFixture
) -> None:
    def script_for(asked: object) -> Script:
        if getattr(asked, "id", "") == "bad":
            raise LookupError("no script for it")
        return Script((ScriptStep((65,)),))

    engine = await start_thread_engine(lambda: ScriptedCore(script_for))
    with caplog.at_level(logging.CRITICAL):
        bad, good = engine.generate(request("bad")), engine.generate(request("good"))
        end = finished(await read(bad))
    assert end.reason is FinishReason.ERROR
    assert "no script for it" in end.message
    answer = await read(good)
    assert finished(answer).reason is FinishReason.STOP
    assert [type(event) for event in answer[:2]] == [Started, TokenDelta]
    await engine.close()


@only_process
async def test_a_folder_named_like_ours_in_the_working_directory_is_not_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    (tmp_path / "engine" / "__main__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    engine = await start()
    assert engine.info.backend == "scripted"

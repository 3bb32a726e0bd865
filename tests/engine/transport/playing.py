"""Requests for scripted engines, and what must be true of every answer."""

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Protocol

import anyio
import msgspec

from engine.scripted import ScriptFile, build_scripted_core
from engine.transport import EngineClient, start_process_engine, start_thread_engine
from engine.types import (
    EngineConfig,
    EngineEvent,
    EngineRequest,
    Finished,
    SamplingParams,
    Started,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)


class Start(Protocol):
    """Starts an engine over the border under test."""

    def __call__(
        self, file: ScriptFile = ..., *, max_running: int = ..., max_waiting: int = ...
    ) -> Awaitable[EngineClient]: ...


def request(
    name: str = "r",
    max_tokens: int = 100000,
    *,
    credits: int = 256,
    num_prompt: int = 3,
    deadline_ns: int = 0,
    stop: tuple[bytes, ...] = (),
) -> EngineRequest:
    """A request that a scripted engine takes."""
    sampling = SamplingParams(max_tokens, stop=stop)
    prompt = pack_tokens([7] * num_prompt)
    return EngineRequest(name, prompt, sampling, deadline_ns=deadline_ns, credits=credits)


async def a_step_passes(engine: EngineClient) -> None:
    """Returns when what was said before has had a step to show in. The first call's answer may
    come while that step computes; the second call is read after it."""
    await engine.stats()
    await engine.stats()


async def start_engine(
    border: str, folder: Path, file: ScriptFile, max_running: int, max_waiting: int
) -> EngineClient:
    """An engine that plays `file`, in a thread or in a process."""
    path = folder / "script.json"
    path.write_bytes(msgspec.json.encode(file))
    config = EngineConfig(
        model=str(path), backend="scripted", max_running=max_running, max_waiting=max_waiting
    )
    if border == "process":
        return await start_process_engine(config)
    return await start_thread_engine(
        lambda: build_scripted_core(config), max_open=max_running + max_waiting
    )


async def read(events: AsyncIterator[EngineEvent]) -> list[EngineEvent]:
    """All that is left of an answer; fails if the end does not come."""
    with anyio.fail_after(30):
        return [event async for event in events]


def tokens_of(events: list[EngineEvent]) -> list[int]:
    """The tokens of an answer, in order."""
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    return [int(token) for delta in deltas for token in unpack_tokens(delta.token_ids)]


def text_of(events: list[EngineEvent]) -> bytes:
    """The bytes of an answer."""
    return b"".join(event.text for event in events if isinstance(event, TokenDelta))


def finished(events: list[EngineEvent]) -> Finished:
    """The terminal event of a whole answer, after checking law 3 and the order of events."""
    last = events[-1]
    assert isinstance(last, Finished)
    assert [event for event in events if isinstance(event, Finished)] == [last]
    assert not any(isinstance(event, Started) for event in events[1:])
    assert len({event.request_id for event in events}) == 1
    if len(events) > 1:
        assert isinstance(events[0], Started)
    assert last.num_output_tokens == len(tokens_of(events))
    return last


def spawn(
    code: str, *arguments: str, fds: tuple[int, ...] = (), stdout: int = subprocess.DEVNULL
) -> "subprocess.Popen[bytes]":
    """A Python process that runs `code`."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=stdout, pass_fds=fds)

"""The generation path where the engine breaks its promises, and for prompts that are tokens."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

import anyio
import pytest

import service.generation
from engine.api import Engine, EngineDead, EngineOverloaded
from engine.types import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    Prompt,
    Started,
    TokenDelta,
    pack_tokens,
)
from service.access.keys import TenantLimits
from service.access.limiter import TenantLimiter
from service.conversation import Conversation, GenerationOptions, GenerationRequest, Message
from service.errors import ApiError
from service.events import Admitted, Completed, Event, Failed, RequestRecord, TextDelta, Usage
from service.generation import Generator
from service.prompts import PromptRenderer
from service.tools.formats import format_of
from service.tools.reader import AnswerReaders
from tests.service.conftest import CONTEXT, INFO, Records, byte_assets

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class BrokenEngine:
    """Plays events; then ends without a Finished, raises what it is given, or hangs."""

    info = INFO
    alive = True

    def __init__(self, *events: EngineEvent | Exception, hangs: bool = False) -> None:
        self.events = events
        self.hangs = hangs
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []

    def generate(self, request: EngineRequest) -> "Events":
        if self.events and isinstance(self.events[0], EngineDead | EngineOverloaded):
            raise self.events[0]
        self.requests.append(request)
        return Events(self._play())

    def check_load(self, prompt: Prompt) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def _play(self) -> AsyncGenerator[EngineEvent, None]:
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event
        if self.hangs:
            await anyio.sleep_forever()


class Events:
    """A stream of which nothing is ready before it is asked for."""

    def __init__(self, events: AsyncGenerator[EngineEvent, None]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self._events

    def ready(self) -> list[EngineEvent]:
        return []

    async def aclose(self) -> None:
        await self._events.aclose()


STARTED = Started("r", 3, 2, 10)
DELTA = TokenDelta("r", pack_tokens([97, 98]), b"ab", 11)
FINISHED = Finished("r", FinishReason.STOP, 3, 2, 2, 12)


def make(engine: BrokenEngine) -> tuple[Generator, Records]:
    records = Records()
    renderer = PromptRenderer(byte_assets(), CONTEXT)
    readers = AnswerReaders(byte_assets(), format_of(None))
    limiter = TenantLimiter(lambda tenant: TenantLimits())
    return Generator(cast(Engine, engine), renderer, readers, records, limiter), records


def request(max_tokens: int | None = None) -> GenerationRequest:
    conversation = Conversation((Message("user", "hi"),))
    return GenerationRequest("r", "m", conversation, GenerationOptions(max_tokens=max_tokens))


def record() -> RequestRecord:
    return RequestRecord("chat", "m", time.monotonic_ns())


async def all_of(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with aclosing(events):
        return [event async for event in events]


async def test_tokens_are_sent_as_they_are_and_nothing_may_be_sampled() -> None:
    engine = BrokenEngine(STARTED, Finished("r", FinishReason.LENGTH, 3, 2, 0, 12))
    generator, records = make(engine)
    events = await all_of(generator.run_tokens(request(max_tokens=0), [1, 2, 3], record()))
    assert events == [Admitted(3), Completed(FinishReason.LENGTH, Usage(3, 2, 0))]
    assert engine.requests[0].token_ids == pack_tokens([1, 2, 3])
    assert engine.requests[0].sampling.max_tokens == 0
    assert engine.aborted == []
    assert len(records.finished) == 1


async def test_completed_carries_all_token_ids() -> None:
    generator, _ = make(BrokenEngine(STARTED, DELTA, DELTA, FINISHED))
    events = await all_of(generator.run(request(), record()))
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["ab", "ab"]
    assert events[-1] == Completed(FinishReason.STOP, Usage(3, 2, 2), None, (97, 98, 97, 98))


@pytest.mark.parametrize("fault", [(), (RuntimeError("boom"),), (EngineDead("gone"),)])
async def test_a_stream_without_its_end_becomes_one_failure(fault: tuple[Exception, ...]) -> None:
    engine = BrokenEngine(STARTED, DELTA, *fault)
    generator, records = make(engine)
    events = await all_of(generator.run(request(), record()))
    assert isinstance(events[-1], Failed)
    assert events[-1].finish_reason is FinishReason.ERROR
    assert sum(isinstance(event, Failed | Completed) for event in events) == 1
    assert engine.aborted == ["r"]
    (kept,) = records.finished
    assert (kept.finish_reason, kept.error_type) == (FinishReason.ERROR, "server_error")
    assert kept.usage == Usage(3, 2, 2)


@pytest.mark.parametrize(
    ("error", "status"), [(EngineDead("gone"), 503), (EngineOverloaded("full", 0.25), 503)]
)
async def test_what_the_engine_refuses_is_raised_and_recorded(
    error: Exception, status: int
) -> None:
    generator, records = make(BrokenEngine(error))
    with pytest.raises(ApiError) as refused:
        await all_of(generator.run(request(), record()))
    assert refused.value.status == status
    (kept,) = records.finished
    assert kept.error_type == refused.value.code
    assert kept.end_ns > kept.start_ns


async def test_a_closed_reader_aborts_and_its_tokens_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where the engine does not answer the abort."""
    monkeypatch.setattr(service.generation, "ABORT_GRACE_S", 0.01)
    engine = BrokenEngine(STARTED, DELTA, DELTA, hangs=True)
    generator, records = make(engine)
    async with aclosing(generator.run(request(), record())) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                break
    assert engine.aborted == ["r"]
    (kept,) = records.finished
    assert kept.finish_reason is FinishReason.ABORT
    assert kept.usage == Usage(3, 2, 4)


async def test_a_cancelled_reader_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.generation, "ABORT_GRACE_S", 0.01)
    engine = BrokenEngine(STARTED, hangs=True)
    generator, records = make(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(all_of, generator.run_tokens(request(), [1, 2, 3], record()))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert engine.aborted == ["r"]
    (kept,) = records.finished
    assert kept.finish_reason is FinishReason.ABORT
    assert kept.usage == Usage(3, 2, 0)

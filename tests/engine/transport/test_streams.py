"""Answers over the border: order, law 3 on every path, registries that empty themselves."""

import asyncio
import gc
import itertools
import random

import anyio
import pytest

from engine.api import EngineDead, EngineOverloaded, RequestRefused
from engine.scripted import Script, ScriptFile, ScriptStep, text_script
from engine.transport.stream import Channel, EventStream
from engine.types import FinishReason, Started, TokenDelta
from tests.engine.transport.playing import (
    Start,
    a_step_passes,
    finished,
    read,
    request,
    text_of,
    tokens_of,
)

pytestmark = pytest.mark.anyio

ENDLESS = ScriptFile(delay_s=0.0)
SILENT = ScriptFile(scripts=(Script(finish=None),))


async def test_answers_keep_their_order_and_their_grouping(start: Start) -> None:
    texts = [f"answer {number}: {'äöü€' * number}" for number in range(12)]
    scripts = tuple(text_script(text, 1 + number % 5) for number, text in enumerate(texts))
    engine = await start(ScriptFile(scripts=scripts))
    streams = [engine.generate(request(f"r{number}")) for number in range(len(texts))]
    answers = await asyncio.gather(*[read(stream) for stream in streams])
    for text, script, answer in zip(texts, scripts, answers, strict=True):
        assert finished(answer).reason is FinishReason.STOP
        assert text_of(answer).decode() == text
        assert tokens_of(answer) == list(text.encode())
        groups = [len(event.token_ids) // 4 for event in answer if isinstance(event, TokenDelta)]
        assert groups == [len(step.token_ids) for step in script.steps]


async def test_times_do_not_go_back(start: Start) -> None:
    engine = await start(ScriptFile(delay_s=0.001))
    answer = await read(engine.generate(request(max_tokens=5)))
    times = [event.time_ns for event in answer]
    assert times == sorted(times)
    phases = finished(answer).phases
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    for before, after in itertools.pairwise(phases):
        assert before.start_ns <= before.end_ns == after.start_ns
    assert phases[-1].end_ns == times[-1]


async def test_max_tokens_zero_says_nothing(start: Start) -> None:
    engine = await start()
    answer = await read(engine.generate(request(max_tokens=0)))
    assert finished(answer).reason is FinishReason.LENGTH
    assert [type(event) for event in answer[:-1]] == [Started]


async def test_aborts_at_random_moments(start: Start) -> None:
    """The aborted answer still ends with its one Finished, which counts what was said."""
    engine = await start(ENDLESS)
    rng = random.Random(11)

    async def abort_after(number: int) -> None:
        stream = engine.generate(request(f"r{number}", credits=rng.randint(1, 9)))
        answer = [await anext(stream) for _ in range(rng.randint(0, 30))]
        engine.abort(f"r{number}")
        engine.abort(f"r{number}")
        answer += await read(stream)
        assert finished(answer).reason is FinishReason.ABORT

    await asyncio.gather(*[abort_after(number) for number in range(60)])
    assert engine.num_open == 0


async def test_abort_on_the_last_token(start: Start) -> None:
    """500 interleavings of an abort with the end (after sgl-project/sglang#40360)."""
    script = Script((ScriptStep((65,)), ScriptStep((66,)), ScriptStep((67,))))
    engine = await start(ScriptFile(scripts=(script,)))
    rng = random.Random(23)
    reasons = []

    async def interleave(number: int) -> None:
        name = f"r{number}"
        stream = engine.generate(request(name, credits=rng.choice([1, 2, 256])))
        answer = [await anext(stream) for _ in range(number % 5)]
        for _ in range(rng.randint(0, 6)):
            await anyio.lowlevel.checkpoint()
        engine.abort(name)
        answer += await read(stream)
        reasons.append(finished(answer).reason)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    for wave in range(25):
        await asyncio.gather(*[interleave(wave * 20 + number) for number in range(20)])
    assert set(reasons) == {FinishReason.ABORT, FinishReason.STOP}
    assert len(reasons) == 500
    assert engine.num_open == 0
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.num_requests) == (0, 0, 500)


@pytest.mark.parametrize("num_read", [0, 1, 4])
async def test_closing_an_iterator_aborts_by_the_next_step(start: Start, num_read: int) -> None:
    engine = await start(ENDLESS)
    stream = engine.generate(request())
    for _ in range(num_read):
        await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await a_step_passes(engine)
    assert engine.num_open == 0
    assert (await engine.stats()).running == 0


async def test_closing_wakes_the_reader(start: Start) -> None:
    engine = await start(SILENT)
    stream = engine.generate(request())
    reading = asyncio.ensure_future(read(stream))
    while not reading.done():
        await engine.stats()
        await stream.aclose()
    assert [type(event) for event in await reading] in ([], [Started])


async def test_an_iterator_that_is_dropped_aborts(start: Start) -> None:
    engine = await start(ENDLESS)
    unread = engine.generate(request("a"))
    partly_read = engine.generate(request("b"))
    await anext(partly_read)
    del unread, partly_read
    gc.collect()
    await anyio.lowlevel.checkpoint()
    await a_step_passes(engine)
    assert engine.num_open == 0
    assert (await engine.stats()).running == 0


async def test_cancelling_the_reader_aborts_and_the_rest_can_be_read(start: Start) -> None:
    engine = await start(SILENT)
    stream = engine.generate(request())
    answer = [await anext(stream)]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(stream)
    assert scope.cancelled_caught
    answer += await read(stream)
    assert finished(answer).reason is FinishReason.ABORT


async def test_a_cancelled_task_leaves_nothing_running(start: Start) -> None:
    engine = await start(SILENT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, engine.generate(request("a")))
        tasks.start_soon(read, engine.generate(request("b")))
        await engine.stats()
        tasks.cancel_scope.cancel()
    gc.collect()
    await anyio.lowlevel.checkpoint()
    await a_step_passes(engine)
    assert engine.num_open == 0
    assert (await engine.stats()).running == 0


async def test_one_task_reads_a_stream(start: Start) -> None:
    engine = await start(SILENT)
    stream = engine.generate(request())
    answer = [await anext(stream)]
    waiting = asyncio.ensure_future(read(stream))
    await anyio.lowlevel.checkpoint()
    with pytest.raises(RuntimeError, match="one task"):
        await anext(stream)
    engine.abort("r")
    assert finished(answer + await waiting).reason is FinishReason.ABORT


async def test_an_id_is_free_again_when_its_request_has_ended(start: Start) -> None:
    engine = await start(ENDLESS)
    stream = engine.generate(request("same"))
    with pytest.raises(RequestRefused) as refused:
        engine.generate(request("same"))
    assert refused.value.field == "id"
    engine.abort("same")
    finished(await read(stream))
    again = engine.generate(request("same", max_tokens=3))
    await stream.aclose()
    assert finished(await read(again)).reason is FinishReason.LENGTH


async def test_a_request_outside_the_limits_is_refused_at_the_call(start: Start) -> None:
    engine = await start(ScriptFile(max_context=8))
    with pytest.raises(RequestRefused) as refused:
        engine.generate(request(num_prompt=8))
    assert refused.value.field == "token_ids"
    assert engine.num_open == 0


async def test_more_than_the_queue_holds_is_refused(start: Start) -> None:
    """After vllm-project/vllm#18826: no waiting queue without a bound."""
    engine = await start(SILENT, max_running=2, max_waiting=1)
    streams = [engine.generate(request(f"r{number}")) for number in range(3)]
    with pytest.raises(EngineOverloaded) as refused:
        engine.generate(request("too many"))
    assert refused.value.retryable
    engine.abort("r0")
    finished(await read(streams[0]))
    streams[0] = engine.generate(request("now"))
    await engine.close()
    for stream in streams:
        assert finished(await read(stream)).reason is FinishReason.ABORT
    with pytest.raises(EngineDead):
        engine.generate(request("late"))


async def test_five_thousand_small_requests_leave_nothing(start: Start) -> None:
    """After ROCm/ATOM#1441: no path leaks its registry entry."""
    engine = await start(ScriptFile(scripts=(text_script("ok", 2),)))
    for wave in range(10):
        names = [f"r{wave}.{number}" for number in range(500)]
        answers = await asyncio.gather(*[read(engine.generate(request(name))) for name in names])
        assert {finished(answer).reason for answer in answers} == {FinishReason.STOP}
    assert engine.num_open == 0
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.num_requests) == (0, 0, 5000)
    gc.collect()
    # By exact type: isinstance reads __class__, which some foreign objects warn about.
    assert not [thing for thing in gc.get_objects() if type(thing) in (Channel, EventStream)]


async def test_calls_answer_while_requests_run(start: Start) -> None:
    engine = await start(ENDLESS)
    streams = [engine.generate(request(f"r{number}", 400)) for number in range(4)]
    reading = asyncio.gather(*[read(stream) for stream in streams])
    while not reading.done():
        stats, dropped, pool = await asyncio.gather(engine.stats(), engine.flush(), engine.audit())
        assert stats.running + stats.waiting <= 4
        assert dropped == 0
        assert pool.free + pool.referenced + pool.cached + pool.pinned == pool.total
    for answer in await reading:
        assert finished(answer).num_output_tokens == 400
    assert (await engine.audit()).referenced == 0

"""A slow reader slows only itself: credits over the border (after Kludex/starlette#1012)."""

import asyncio

import pytest

from engine.scripted import Script, ScriptFile, ScriptStep, text_script
from engine.transport.stream import Channel, EventStream
from engine.types import FinishReason, Started, TokenDelta, pack_tokens
from tests.engine.transport.playing import Start, finished, read, request, text_of, tokens_of

pytestmark = pytest.mark.anyio

COUNTING = bytes(range(256)) * 3


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_an_unread_request_pauses_alone_and_goes_on_whole(
    start: Start, tokens_per_step: int
) -> None:
    engine = await start(ScriptFile(scripts=(text_script(COUNTING, tokens_per_step),)))
    unread = engine.generate(request("unread", credits=10))
    names = [f"r{number}" for number in range(5)]
    others = await asyncio.gather(*[read(engine.generate(request(name))) for name in names])
    for answer in others:
        assert finished(answer).reason is FinishReason.STOP
        assert tokens_of(answer) == list(COUNTING)
    stats = await engine.stats()
    assert stats.running == 1
    assert stats.num_output_tokens == 5 * len(COUNTING) + 10
    num_steps = stats.num_steps
    assert (await engine.stats()).num_steps == num_steps, "the paused request keeps the loop busy"
    answer = await read(unread)
    assert finished(answer).reason is FinishReason.STOP
    assert tokens_of(answer) == list(COUNTING)
    assert text_of(answer) == COUNTING


@pytest.mark.parametrize("credits", [1, 2, 3])
async def test_the_smallest_windows_never_dry_up(start: Start, credits: int) -> None:
    engine = await start(ScriptFile(scripts=(text_script(COUNTING, 7),)))
    answer = await read(engine.generate(request(credits=credits)))
    finished(answer)
    assert tokens_of(answer) == list(COUNTING)
    assert all(
        len(event.token_ids) // 4 <= credits for event in answer if isinstance(event, TokenDelta)
    )


async def test_what_came_while_nobody_read_is_ready_and_returns_its_credits(start: Start) -> None:
    engine = await start(ScriptFile(scripts=(text_script(COUNTING, 5),)))
    stream = engine.generate(request(credits=20))
    assert stream.ready() == []
    while (await engine.stats()).num_output_tokens < 20:
        pass
    answer = [await anext(aiter(stream)), *stream.ready()]
    assert len(tokens_of(answer)) == 20
    assert stream.ready() == []
    answer += await read(stream)
    finished(answer)
    assert tokens_of(answer) == list(COUNTING)


async def test_a_paused_request_can_be_aborted(start: Start) -> None:
    engine = await start(ScriptFile(delay_s=0.0))
    stream = engine.generate(request(credits=5))
    while (await engine.stats()).num_output_tokens < 5:
        pass
    engine.abort("r")
    answer = await read(stream)
    assert finished(answer).reason is FinishReason.ABORT
    assert len(tokens_of(answer)) == 5


async def test_prompts_larger_than_the_socket_takes_at_once(start: Start) -> None:
    """The edge never blocks on sending: what is too much goes out when the socket is writable."""
    engine = await start(ScriptFile(scripts=(text_script("ok"),)))
    streams = [engine.generate(request(f"r{n}", num_prompt=120_000)) for n in range(8)]
    for answer in await asyncio.gather(*[read(stream) for stream in streams]):
        assert finished(answer).reason is FinishReason.STOP
        assert isinstance(answer[0], Started)
        assert answer[0].num_prompt_tokens == 120_000


async def test_steps_larger_than_the_socket_takes_at_once(start: Start) -> None:
    """The engine never blocks on sending: the rest of a message goes out later, in order."""
    long_text = bytes(range(256)) * 512
    steps = tuple(ScriptStep((number,), text=long_text) for number in range(4))
    engine = await start(ScriptFile(scripts=(Script(steps),)))
    streams = [engine.generate(request(f"r{number}")) for number in range(4)]
    for answer in await asyncio.gather(*[read(stream) for stream in streams]):
        assert tokens_of(answer) == list(range(4))
        assert text_of(answer) == long_text * 4


class _Border:
    """Counts what a stream says."""

    def __init__(self) -> None:
        self.granted: list[int] = []

    def grant(self, request_id: str, credits: int) -> None:
        self.granted.append(credits)

    def abort(self, request_id: str) -> None:
        raise AssertionError("nothing aborts here")

    def abandon(self, channel: Channel) -> None:
        """The test's stream is dropped before it has ended."""


async def test_credits_return_by_halves(border: str) -> None:
    """A message per read token would double the traffic."""
    told = _Border()
    channel = Channel(request(credits=256))
    stream = EventStream(told, channel)
    for number in range(1000):
        channel.push(TokenDelta("r", pack_tokens([number]), b"", 1))
        await anext(stream)
    assert told.granted == [128] * 7

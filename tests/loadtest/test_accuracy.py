"""The client's clock against the server's: both of this process, so the same one."""

import asyncio
import itertools
import statistics

import pytest

from loadtest.measure.histogram import Histogram
from loadtest.measure.progress import Progress
from loadtest.measure.result import Level
from loadtest.measure.summary import summarise
from loadtest.run import run_plan
from loadtest.transports import Target, open_transport
from loadtest.workloads import Slo, build_plan, read_workload
from tests.loadtest.playing import Play, playing

DELAY_S = 0.03


@pytest.mark.parametrize("transport", ["chat-sse", "responses-sse", "responses-ws", "messages"])
def test_gaps_and_rates_are_those_of_the_server(transport: str) -> None:
    """Medians within 3 per cent of what the server noted when each piece left it, whatever the
    machine made of the delays."""
    play = Play(pieces=("word ",) * 12, delay_s=DELAY_S)
    plan = build_plan(read_workload("agents"), "1", concurrency=2)
    progress = Progress(plan.num_turns)

    async def work(url: str) -> None:
        opened = open_transport(transport, Target("played", url, "m"))
        await run_plan(plan, opened, progress, asyncio.Event())
        await opened.close()

    with playing(play) as url:
        asyncio.run(work(url))
    figures = summarise("t", Level("concurrency", 2), 0, progress, Slo(), streams=False).figures
    gaps = [b - a for times in play.sent_s for a, b in itertools.pairwise(times)]
    assert statistics.median(gaps) >= DELAY_S * 0.99
    assert figures["itl_p50_ms"] == pytest.approx(statistics.median(gaps) * 1e3, rel=0.03)
    first_s, last_s = play.sent_s[0][0], max(times[-1] for times in play.sent_s)
    server_rate = sum(map(len, play.sent_s)) / (last_s - first_s + DELAY_S)
    assert figures["output_tok_per_s"] == pytest.approx(server_rate, rel=0.05)


def test_first_tokens_are_seen_when_they_leave() -> None:
    """Each first piece is seen after it left and before the next one did."""
    play = Play(pieces=("word ",) * 3, delay_s=DELAY_S)
    plan = build_plan(read_workload("agents"), "1", concurrency=1)
    progress = Progress(plan.num_turns)

    async def work(url: str) -> None:
        opened = open_transport("chat-sse", Target("played", url, "m"))
        await run_plan(plan, opened, progress, asyncio.Event())
        await opened.close()

    with playing(play) as url:
        asyncio.run(work(url))
    for sample, times in zip(progress.samples, play.sent_s, strict=True):
        assert all(seen > left for seen, left in zip(sample.piece_s, times, strict=True))
        lateness = [seen - left for seen, left in zip(sample.piece_s, times, strict=True)]
        assert statistics.median(lateness) < DELAY_S


def test_a_histogram_keeps_three_digits() -> None:
    histogram = Histogram()
    for micros in range(1, 100_000, 97):
        histogram.record(micros / 1e6)
    assert histogram.at(50) == pytest.approx(50, rel=2e-3)

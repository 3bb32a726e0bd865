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
TRIES = 8
"""A busy machine lets one side wait for its turn; what the client itself gets wrong, it gets wrong
at every try."""


@pytest.mark.parametrize("transport", ["chat-sse", "responses-sse", "responses-ws", "messages"])
def test_gaps_and_rates_are_those_of_the_server(transport: str) -> None:
    """Medians within 3 per cent of what the server noted when each piece left it, whatever the
    machine made of the delays."""
    compared = []
    for _ in range(TRIES):
        compared.append(compare(transport))
        (gap_ms, server_gap_ms), (rate, server_rate) = compared[-1]
        if gap_ms == pytest.approx(server_gap_ms, rel=0.03) and rate == pytest.approx(
            server_rate, rel=0.05
        ):
            return
    pytest.fail(f"ours and the server's: {compared}")


def compare(transport: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median gaps in ms, and tokens per second: the client's and the server's."""
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
    first_s, last_s = play.sent_s[0][0], max(times[-1] for times in play.sent_s)
    server_rate = sum(map(len, play.sent_s)) / (last_s - first_s + DELAY_S)
    server_gap_ms = statistics.median(gaps) * 1e3
    return (figures["itl_p50_ms"], server_gap_ms), (figures["output_tok_per_s"], server_rate)


def test_first_tokens_are_seen_when_they_leave() -> None:
    """Each piece is seen after it left, and most before the next one did."""
    medians_s = []
    for _ in range(TRIES):
        lateness = lateness_of_a_run()
        assert min(lateness) > 0
        medians_s.append(statistics.median(lateness))
        if medians_s[-1] < DELAY_S:
            return
    pytest.fail(f"they come late by {medians_s}")


def lateness_of_a_run() -> list[float]:
    """How long after it left each piece was seen."""
    play = Play(pieces=("word ",) * 3, delay_s=DELAY_S)
    plan = build_plan(read_workload("agents"), "1", concurrency=1)
    progress = Progress(plan.num_turns)

    async def work(url: str) -> None:
        opened = open_transport("chat-sse", Target("played", url, "m"))
        await run_plan(plan, opened, progress, asyncio.Event())
        await opened.close()

    with playing(play) as url:
        asyncio.run(work(url))
    return [
        seen - left
        for sample, times in zip(progress.samples, play.sent_s, strict=True)
        for seen, left in zip(sample.piece_s, times, strict=True)
    ]


def test_a_histogram_keeps_three_digits() -> None:
    histogram = Histogram()
    for micros in range(1, 100_000, 97):
        histogram.record(micros / 1e6)
    assert histogram.at(50) == pytest.approx(50, rel=2e-3)

"""Probes beside running streams: when they are sent, and what is told of both."""

import asyncio

import pytest

from loadtest import arrival
from loadtest.measure.pooled import pool
from loadtest.measure.progress import Progress
from loadtest.measure.sample import Role, Usage
from loadtest.report.html import page
from loadtest.report.table import beside_table, notes
from loadtest.run import run_plan
from loadtest.transports import Target, open_transport
from loadtest.workloads import Workload, build_plan
from loadtest.workloads.spec import Conversations
from tests.loadtest.playing import Play, playing
from tests.loadtest.samples import report_of, run_of, sample

STREAMS = 3


def workload(sessions_each: int) -> Workload:
    streams = Conversations(
        name="streams",
        user_tokens=5,
        output_tokens=40,
        arrival=arrival.Closed(STREAMS, sessions_each),
    )
    probes = Conversations(
        name="probes",
        user_tokens=50,
        output_tokens=40,
        arrival=arrival.Beside(times=3, alone=2, pause_s=0.01),
    )
    return Workload("", (streams, probes))


def progress_of(sessions_each: int, play: Play) -> Progress:
    plan = build_plan(workload(sessions_each), "1")
    progress = Progress(plan.num_turns)

    async def work(url: str) -> None:
        transport = open_transport("chat-sse", Target("played", url, "m"))
        await run_plan(plan, transport, progress, asyncio.Event())
        await transport.close()

    with playing(play) as url:
        asyncio.run(work(url))
    return progress


def test_a_probe_comes_when_every_stream_runs() -> None:
    progress = progress_of(50, Play(pieces=("word ",) * 40, delay_s=0.005))
    by_role = {
        role: [one for one in progress.samples if one.role is role and one.good] for role in Role
    }
    alone, beside = by_role[Role.PROBE_ALONE], by_role[Role.PROBE_BESIDE]
    streams = by_role[Role.ORDINARY]
    assert [len(alone), len(beside)] == [2, 3]
    assert max(one.end_s for one in alone) <= min(one.sent_s for one in streams)
    for probe in beside:
        running = [one for one in streams if one.piece_s[0] <= probe.sent_s <= one.end_s]
        assert len(running) == STREAMS
    assert progress.num_turns == len(progress.samples) < 100
    assert progress.num_skipped == 0


def test_probes_whose_streams_ended_are_told() -> None:
    play = Play(pieces=("word ",) * 3)
    progress = progress_of(1, play)
    roles = [one.role for one in progress.samples]
    assert roles.count(Role.PROBE_ALONE) == 2
    assert roles.count(Role.PROBE_BESIDE) + progress.num_skipped == 3
    assert progress.num_skipped > 0
    run = run_of(progress.samples)
    assert run.figures["requests"] == len(progress.samples)


def test_gaps_during_a_prefill_are_told_from_others() -> None:
    """A probe waits from 10.25 to 10.75: of the stream's gaps the third and fourth overlap that."""
    stream = sample(times_s=(10.1, 10.15, 10.2, 10.4, 11.0, 11.02), usage=Usage(10, 6))
    alone = sample(times_s=(10.2,), usage=Usage(1000, 1, 0), role=Role.PROBE_ALONE)
    probe = sample(due_s=10.25, times_s=(10.75,), usage=Usage(1000, 1, 100), role=Role.PROBE_BESIDE)
    run = run_of([stream, alone, probe])
    figures = run.figures
    assert figures["itl_beside_p50_ms"] == pytest.approx(200, rel=2e-3)
    assert figures["itl_beside_max_ms"] == pytest.approx(600, rel=2e-3)
    assert figures["itl_quiet_max_ms"] == pytest.approx(50, rel=2e-3)
    assert figures["prefill_alone_tok_per_s"] == pytest.approx(5000)
    assert figures["prefill_beside_tok_per_s"] == pytest.approx(1800)
    assert figures["prefill_share"] == pytest.approx(0.36)
    assert figures["streams_beside"] == 1
    assert "36%" in beside_table(pool([run]))
    assert "Between tokens beside a prefill" in page(report_of([run]))


def test_a_workload_without_probes_says_nothing_of_them() -> None:
    run = run_of([sample()])
    assert beside_table(pool([run])) == ""
    assert "beside" not in " ".join(run.figures)
    assert notes(report_of([run])) == []

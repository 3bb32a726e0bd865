"""Whole runs against a played server: what goes wrong is reported, never hidden."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from loadtest.campaign import Campaign, Outcome, run_campaign
from loadtest.measure.pooled import pool
from loadtest.measure.progress import Progress
from loadtest.measure.result import Level
from loadtest.report.table import figures_table, notes
from loadtest.run import run_plan
from loadtest.transports import Target, open_transport
from loadtest.workloads import Slo, Workload, build_plan, read_workload
from tests.loadtest.playing import Play, playing
from tests.loadtest.samples import report_of


@contextlib.asynccontextmanager
async def unseen(*_: object) -> AsyncIterator[None]:
    """Nobody watches."""
    yield


def campaign(
    *targets: Target, workload: Workload | None = None, repeats: int = 1, warm: bool = False
) -> Campaign:
    return Campaign(
        workload=workload or read_workload("agents"),
        transport="chat-sse",
        targets=targets,
        levels=(Level("concurrency", 2),),
        repeats=repeats,
        seed="1",
        slo=Slo(),
        warm=warm,
    )


def outcome_of(what: Campaign, stop: Callable[[asyncio.Event], object] | None = None) -> Outcome:
    outcome = Outcome([], [])

    async def work() -> None:
        event = asyncio.Event()
        if stop is not None:
            stop(event)
        await run_campaign(what, outcome, unseen, event)

    asyncio.run(work())
    return outcome


def target(url: str, name: str = "played", stall_s: float = 30.0) -> Target:
    return Target(name, url, "", stall_s=stall_s)


def test_a_run_sends_every_turn_with_the_answers_before_it() -> None:
    play = Play()
    with playing(play) as url:
        (run,) = outcome_of(campaign(target(url))).runs
    assert run.figures["requests"] == 8
    assert run.figures["output_tokens"] == 24
    assert run.figures["cached_share"] == pytest.approx(0.8)
    assert not run.errors and not run.findings
    assert [turn.num_requests for turn in run.turns] == [2, 2, 2, 2]
    by_length = sorted(len(body["messages"]) for body in play.bodies[1:])
    assert by_length == [2, 2, 4, 4, 6, 6, 8, 8]


def test_targets_get_the_same_requests_and_take_turns_at_being_first() -> None:
    ours, theirs = Play(), Play()
    with playing(ours) as our_url, playing(theirs) as their_url:
        outcome = outcome_of(
            campaign(target(our_url, "ours"), target(their_url, "theirs"), repeats=2)
        )
    order = [(run.target, run.repeat) for run in outcome.runs]
    assert order == [("ours", 0), ("theirs", 0), ("theirs", 1), ("ours", 1)]

    def said(play: Play) -> set[str]:
        return {str(body["messages"]) for body in play.bodies}

    assert said(ours) == said(theirs)
    systems = {body["messages"][0]["content"] for body in ours.bodies if len(body["messages"]) > 1}
    assert len(systems) == 2


@pytest.mark.parametrize(
    ("listed", "told"), [("/data/models/one.gguf", "one.gguf"), ("org/one", "org/one")]
)
def test_a_model_that_is_a_path_is_told_by_its_name_alone(listed: str, told: str) -> None:
    play = Play(model=listed)
    with playing(play) as url:
        outcome = outcome_of(campaign(target(url)))
    assert [one.model for one in outcome.targets] == [told]
    assert {body["model"] for body in play.bodies} == {listed}


def test_warm_runs_send_each_prefix_first() -> None:
    play = Play()
    with playing(play) as url:
        outcome_of(campaign(target(url), warm=True))
    system, asked = play.bodies[0]["messages"]
    assert system["content"] == play.bodies[1]["messages"][0]["content"]
    assert asked["content"] == "Say ready."


def test_a_dead_target_is_reported_and_the_other_runs() -> None:
    with playing(Play()) as gone:
        pass
    with playing(Play()) as url:
        outcome = outcome_of(campaign(target(gone, "dead"), target(url, "alive")))
    dead, alive = outcome.targets
    assert dead.dead is not None and "connect" in dead.dead.lower()
    assert alive.dead is None
    assert [run.target for run in outcome.runs] == ["alive"]


@pytest.mark.parametrize(
    ("play", "kind"),
    [
        (Play(status=429), "http_429"),
        (Play(ending="stall"), "stalled"),
        (Play(ending="cut"), "cut"),
        (Play(ending="error"), "server_error"),
    ],
    ids=["storm", "stall", "cut", "error"],
)
def test_failures_are_counted_by_kind_and_told(play: Play, kind: str) -> None:
    with playing(play) as url:
        outcome = outcome_of(campaign(target(url, stall_s=0.2)))
    (run,) = outcome.runs
    assert run.errors == {kind: 2}
    assert run.num_skipped == 6
    assert run.figures["error_rate"] == 1.0
    assert "ttft_p50_ms" not in run.figures
    told = " ".join(notes(report_of(outcome.runs)))
    assert f"2 requests failed ({kind})" in told
    assert "6 turns were not sent" in told
    assert "played" in figures_table(pool(outcome.runs))


def test_a_target_that_accepts_and_never_answers_is_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        outcome = outcome_of(campaign(target(url, stall_s=0.2)))
    (dead,) = outcome.targets
    assert dead.dead == "no answer within 0.2 s"
    assert outcome.runs == []


def test_a_storm_of_429_beside_good_answers_is_counted_apart() -> None:
    """Of eight conversations each second request is refused."""
    play = Play()

    async def gate() -> None:
        play.status = 429 if len(play.bodies) % 2 else 200

    play.gate = gate
    with playing(play) as url:
        outcome = outcome_of(campaign(target(url), workload=read_workload("shared-prefix")))
    (run,) = outcome.runs
    assert run.figures["requests"] == 16
    assert run.errors == {"http_429": 8}
    assert run.figures["error_rate"] == 0.5
    assert "retry after 3" in run.error_examples["http_429"]
    assert run.figures["output_tokens"] == 8 * 3
    assert outcome.runs[0].num_skipped == 0


def test_a_target_that_dies_in_the_middle_is_told() -> None:
    """It answers the warm-up and both first turns, and is killed by the next request."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.loadtest.playing", "3"], stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        outcome = outcome_of(campaign(target(url), repeats=2))
    assert server.returncode == -signal.SIGKILL
    first, second = outcome.runs
    assert sum(first.errors.values()) == 2
    assert set(first.errors) <= {"cut", "connect"}
    assert first.figures["requests"] + first.num_skipped == 8
    assert second.errors == {"connect": 2}


def test_a_prompt_count_that_cannot_be_true_is_told_and_not_summed() -> None:
    with playing(Play(usage=(1_000_000, 3, 0))) as url:
        outcome = outcome_of(campaign(target(url)))
    (run,) = outcome.runs
    assert run.findings == {"more prompt tokens claimed than the conversation has bytes": 8}
    assert run.figures["prompt_tokens"] == 0
    assert run.figures["output_tokens"] == 24


def test_a_server_that_lies_about_usage_is_told_and_not_believed() -> None:
    with playing(Play(usage=(100, 1, 500))) as url:
        outcome = outcome_of(campaign(target(url)))
    (run,) = outcome.runs
    assert run.figures["output_tokens"] == 24
    told = " ".join(notes(report_of(outcome.runs)))
    assert "fewer output tokens claimed" in told
    assert "more cached tokens claimed" in told


def test_a_stop_leaves_what_had_run() -> None:
    """The server answers the warm-up and both first turns; the stop comes while the second turns
    wait for ever."""
    play = Play()
    outcome = Outcome([], [])

    async def work(url: str) -> Outcome:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def gate() -> None:
            if len(play.bodies) == 5:
                loop.call_soon_threadsafe(stop.set)
            if len(play.bodies) > 3:
                await asyncio.sleep(3600)

        play.gate = gate
        await run_campaign(campaign(target(url), repeats=3), outcome, unseen, stop)
        return outcome

    with playing(play) as url:
        outcome = asyncio.run(work(url))
    assert outcome.interrupted
    (run,) = outcome.runs
    assert run.interrupted
    assert run.figures["requests"] == 2
    assert run.errors == {}
    assert [stream.error for stream in run.streams].count("interrupted") == 2
    assert notes(report_of(outcome.runs, interrupted=True))[0].startswith("Interrupted")


def test_a_stop_before_the_first_run_leaves_an_empty_outcome() -> None:
    with playing(Play()) as url:
        outcome = outcome_of(campaign(target(url)), stop=lambda event: event.set())
    assert outcome.interrupted
    assert outcome.runs == []


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The server holds every answer until all requests of the burst have come: a client that
    waited for one before it sent the next would wait for ever."""
    play = Play()

    all_came = asyncio.Event()

    async def gate() -> None:
        if len(play.bodies) == 8:
            all_came.set()
        await all_came.wait()

    play.gate = gate
    plan = build_plan(read_workload("burst"), "1")
    (part,) = plan.parts
    burst = type(plan)((type(part)(part.name, part.sessions[:8], None),))

    async def work(url: str) -> Progress:
        progress = Progress(burst.num_turns)
        transport = open_transport("chat-sse", Target("played", url, "m"))
        await run_plan(burst, transport, progress, asyncio.Event())
        await transport.close()
        return progress

    with playing(play) as url:
        progress = asyncio.run(work(url))
    assert len(progress.samples) == 8
    assert all(sample.good for sample in progress.samples)
    assert {sample.due_s for sample in progress.samples} == {progress.start_s}


def test_forks_run_side_by_side_with_the_rest_of_their_parent() -> None:
    play = Play()
    workload = read_workload("agents-forks")
    quick = msgspec.structs.replace(workload.parts[0], wait_s=0.0)
    plan = build_plan(msgspec.structs.replace(workload, parts=(quick,)), "1", concurrency=1)

    async def work(url: str) -> Progress:
        progress = Progress(plan.num_turns)
        transport = open_transport("chat-sse", Target("played", url, "m"))
        await run_plan(plan, transport, progress, asyncio.Event())
        await transport.close()
        return progress

    with playing(play) as url:
        progress = asyncio.run(work(url))
    assert sorted((s.session, s.turn) for s in progress.samples) == [
        *(("0", turn) for turn in range(4)),
        *(("0.0", turn) for turn in (2, 3)),
        *(("0.1", turn) for turn in (2, 3)),
    ]
    pasts = {str(body["messages"][:4]) for body in play.bodies if len(body["messages"]) >= 6}
    assert len(pasts) == 1

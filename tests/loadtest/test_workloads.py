"""Workloads are the same for the same seed, and have the structure that their files state."""

import json
from pathlib import Path

import msgspec
import pytest

from loadtest import arrival
from loadtest.plan import Plan, Session
from loadtest.workloads import WorkloadError, build_plan, names, read_workload

MADE_UP = [name for name in names() if not name.startswith("replay")]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def mooncake(path: Path, rows: list[tuple[int, int, int, list[int]]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return write(
        path, "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
    )


def rounds(path: Path, rows: list[tuple[int, int, int, list[float]]]) -> str:
    """A TraceLab file of one session: rows of (prompt, cached, output, tool times in ms)."""
    lines = [
        {
            "session_id": "a",
            "round_index": index,
            "input_tokens_total": prompt,
            "prefix_tokens": cached,
            "output_tokens": output,
            "tools": [{"tool_wall_latency_ms": wall_ms} for wall_ms in waits],
        }
        for index, (prompt, cached, output, waits) in enumerate(rows)
    ]
    return write(path, "".join(json.dumps(line) + "\n" for line in lines))


def sessions(plan: Plan) -> list[Session]:
    return [session for part in plan.parts for session in part.sessions]


@pytest.mark.parametrize("name", MADE_UP)
def test_a_seed_fixes_everything(name: str) -> None:
    workload = read_workload(name)
    assert build_plan(workload, "7") == build_plan(workload, "7")
    assert build_plan(workload, "7") != build_plan(workload, "8")


@pytest.mark.parametrize("name", MADE_UP)
def test_another_seed_shares_no_prefix(name: str) -> None:
    workload = read_workload(name)
    ours = {session.system[:40] for session in sessions(build_plan(workload, "7"))}
    theirs = {session.system[:40] for session in sessions(build_plan(workload, "8"))}
    assert not ours & theirs


def test_agents_share_one_prompt_and_say_different_things() -> None:
    own = sessions(build_plan(read_workload("agents"), "1", concurrency=6))
    assert len(own) == 6
    assert len({session.system for session in own}) == 1
    texts = [turn.text for session in own for turn in session.turns]
    assert len(set(texts)) == len(texts) == 24


def test_forks_begin_after_the_stated_turn_and_say_their_own() -> None:
    plan = build_plan(read_workload("agents-forks"), "1", concurrency=2)
    for session in sessions(plan):
        assert len(session.forks) == 2
        assert session.fork_after == 2
        assert [len(fork.turns) for fork in session.forks] == [2, 2]
        later = [session.turns[2].text, *(fork.turns[0].text for fork in session.forks)]
        assert len(set(later)) == 3
    assert plan.num_turns == 2 * (4 + 2 + 2)


def test_popular_documents_come_again() -> None:
    own = sessions(build_plan(read_workload("rag"), "1", concurrency=20))
    documents = [line for session in own for line in session.turns[0].text.split("\n")[:2]]
    assert 1 < len(set(documents)) <= 20 < len(documents)


def test_a_sweep_changes_only_arrivals_it_is_about() -> None:
    mixed = build_plan(read_workload("mixed"), "1", concurrency=9)
    assert [part.concurrency for part in mixed.parts] == [9, None]
    assert mixed.parts[1] == build_plan(read_workload("mixed"), "1").parts[1]
    fast = build_plan(read_workload("chat"), "1", rate_per_s=50.0)
    slow = build_plan(read_workload("chat"), "1", rate_per_s=0.5)
    for quick, late in zip(sessions(fast), sessions(slow), strict=True):
        assert quick.start_s is not None
        assert late.start_s == pytest.approx(100 * quick.start_s)
        assert quick.turns == late.turns


def test_bursts_arrive_together() -> None:
    starts = [session.start_s for session in sessions(build_plan(read_workload("burst"), "1"))]
    assert starts == [0.0] * 8 + [10.0] * 8 + [20.0] * 8 + [30.0] * 8


def test_mooncake_ids_are_prefixes_and_lengths_are_scaled(tmp_path: Path) -> None:
    rows = [
        (2000, 1024 + 320, 640, [5, 6, 7]),
        (5000, 1024 + 64, 64, [5, 6, 8]),
        (5000, 512, 3, [9]),
    ]
    trace = mooncake(tmp_path / "trace.jsonl", rows)
    first, second, third = sessions(build_plan(read_workload("replay", trace), "1"))
    one, two, three = (session.turns[0].text.split() for session in (first, second, third))
    assert [len(one), len(two), len(three)] == [42, 34, 16]
    assert one[:32] == two[:32]
    assert one[32:34] != two[32:34]
    assert one[:16] != three
    assert [session.turns[0].max_tokens for session in (first, second, third)] == [20, 2, 1]
    assert [session.start_s for session in (first, second, third)] == [0.0, 6.0, 6.0]


def test_tracelab_turns_grow_by_what_is_new_and_wait_for_the_slowest_tool(tmp_path: Path) -> None:
    trace = rounds(
        tmp_path / "rounds.jsonl",
        [(6400, 3200, 320, [500.0, 2000.0]), (7040, 6400, 64, []), (3200, 0, 32, [])],
    )
    plan = build_plan(read_workload("replay-agents", trace), "1", concurrency=2)
    first, compacted = sessions(plan)[:2]
    assert len(first.system.split()) == 100
    assert [len(turn.text.split()) for turn in first.turns] == [100, 10]
    assert [turn.max_tokens for turn in first.turns] == [10, 2]
    assert [turn.wait_s for turn in first.turns] == [0.0, 0.2]
    assert [len(turn.text.split()) for turn in compacted.turns] == [100]


def test_tracelab_contexts_follow_the_recorded_ones_where_agents_drop_answers(
    tmp_path: Path,
) -> None:
    """The second round's prompt has 32 tokens more than the first's, though 320 were answered;
    the third makes up for what the replay had too many of."""
    recorded: list[tuple[int, int, int, list[float]]]
    recorded = [(6400, 3200, 320, []), (6432, 6400, 32, []), (9600, 6400, 32, [])]
    trace = rounds(tmp_path / "rounds.jsonl", recorded)
    (session,) = sessions(build_plan(read_workload("replay-agents", trace), "1", concurrency=1))[:1]
    context = len(session.system.split())
    lengths = []
    for turn in session.turns:
        lengths.append(context := context + len(turn.text.split()))
        context += turn.max_tokens
    assert lengths == [200, 211, 300]


@pytest.mark.parametrize("name", ["replay", "replay-agents"])
def test_a_trace_that_is_used_again_has_new_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    chats, agents = [(0, 3200, 320, [7])], [(6400, 3200, 320, [0.0])]
    workload = read_workload(
        name, mooncake(path, chats) if name == "replay" else rounds(path, agents)
    )
    closed = arrival.Closed(concurrency=3)
    part = msgspec.structs.replace(workload.parts[0], arrival=closed)
    own = sessions(build_plan(msgspec.structs.replace(workload, parts=(part,)), "1"))
    assert len({session.turns[0].text for session in own}) == 3
    assert len({session.system for session in own}) == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("unknown", None, "known: agents"),
        ("bad.toml", "description = 3", "str"),
        ("bad.toml", 'description = "x"\nparts = []', "length"),
    ],
)
def test_a_bad_workload_is_explained(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    path = write(tmp_path / name, text) if text is not None else name
    with pytest.raises(WorkloadError, match=said):
        read_workload(path)


def test_probes_need_streams_beside_them() -> None:
    mixed = read_workload("mixed")
    alone = msgspec.structs.replace(mixed, parts=mixed.parts[1:])
    with pytest.raises(WorkloadError, match="closed one beside it"):
        build_plan(alone, "1")


def test_a_replay_without_a_trace_is_explained() -> None:
    with pytest.raises(WorkloadError, match=r"--trace FILE.*github\.com/kvcache-ai"):
        build_plan(read_workload("replay"), "1")


def test_a_trace_that_is_none_is_explained(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="mooncake"):
        build_plan(read_workload("replay", write(tmp_path / "t.jsonl", "{}\n")), "1")

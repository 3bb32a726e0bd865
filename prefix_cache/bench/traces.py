"""Workloads as sequences of requests, each a list of page ids from its first page on: equal ids
at the same place after equal ids are a common prefix."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. `page_tokens` is how many tokens an id stands for."""

    name: str
    page_tokens: int
    requests: Sequence[Sequence[int]]

    @property
    def num_pages(self) -> int:
        """Pages asked for."""
        return sum(map(len, self.requests))

    @property
    def num_unique(self) -> int:
        """Pages there are: what an unbounded cache would hold at the end."""
        return len({page for request in self.requests for page in request})


class _TraceLine(msgspec.Struct):
    hash_ids: list[int]


def read_trace(path: Path) -> Workload:
    """A trace in Mooncake's format: a JSON object per line with `hash_ids`, of 512 tokens each.

    Raises OSError, msgspec.MsgspecError.
    """
    decode = msgspec.json.Decoder(_TraceLine).decode
    lines = path.read_bytes().splitlines()
    return Workload(path.stem, 512, [decode(line).hash_ids for line in lines if line.strip()])


def read_rounds(path: Path) -> list[tuple[int, int]]:
    """Rounds of recorded agent sessions: tokens read from the cache, and tokens in all."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [(int(row["prefix_tokens"]), int(row["input_tokens_total"])) for row in rows]


_PAGE_TOKENS = 64
_NUM_SESSIONS = 700
_NUM_FLEETS = 12


def agents(seed: int = 1) -> Workload:
    """Coding agents of several fleets, made up: each fleet has a system prompt with tools of its
    own, sessions begin at random, most tasks need few turns and some need dozens, tools take
    seconds or minutes, and now and then a sub-agent forks off or a history is compacted."""
    rng = random.Random(seed)
    ids = iter(range(1 << 40))
    fleets = [[next(ids) for _ in range(rng.randint(30, 160))] for _ in range(_NUM_FLEETS)]
    arrivals: list[tuple[float, list[int]]] = []
    for _ in range(_NUM_SESSIONS):
        fleet = fleets[min(int(rng.expovariate(0.4)), _NUM_FLEETS - 1)]
        _session(rng, ids, rng.random() * 3600, list(fleet), _num_turns(rng), arrivals)
    arrivals.sort(key=lambda arrival: arrival[0])
    return Workload("agents", _PAGE_TOKENS, [pages for _, pages in arrivals])


def _num_turns(rng: random.Random) -> int:
    return 1 + int(rng.paretovariate(0.9)) if rng.random() < 0.7 else 1


def _session(
    rng: random.Random,
    ids: Iterator[int],
    start_s: float,
    history: list[int],
    num_turns: int,
    arrivals: list[tuple[float, list[int]]],
) -> None:
    """Append a session's requests: every turn sends all that stood before it, and more."""
    system = len(history)
    for turn in range(min(num_turns, 60)):
        history = history + [next(ids) for _ in range(1 + int(rng.expovariate(1 / 6)))]
        arrivals.append((start_s, history))
        if turn and rng.random() < 0.04:
            branch = history[: rng.randint(system, len(history))]
            _session(rng, ids, start_s + 2, branch, rng.randint(1, 4), arrivals)
        if rng.random() < 0.02:
            history = history[:system]
        start_s += rng.lognormvariate(2.5, 1.3)

"""The benches measure what they say they do; their figures are not judged here."""

import itertools
import os
from pathlib import Path

import pytest

from prefix_cache.bench.hit_rate import compare, replay, table
from prefix_cache.bench.memory import branch_pages
from prefix_cache.bench.optimum import optimal_hits
from prefix_cache.bench.traces import Workload, agents, read_trace
from prefix_cache.eviction import ExpectedReuse, LeastRecentlyUsed

TRACE = os.environ.get("HEADWATER_MOONCAKE_TRACE", "")
"""Where Mooncake's conversation_trace.jsonl is, which is not ours to copy."""


def best_by_trial(requests: list[list[int]], num_pages: int) -> int:
    """The most hits over all sets of pages that could be kept beside and after each request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = 0
            while found < len(request) and request[found] in kept:
                found += 1
            there = kept | set(request)
            for size in range(min(len(there), num_pages) + 1):
                for choice in map(frozenset, itertools.combinations(there, size)):
                    fits = len(choice | set(request)) <= num_pages
                    if fits and hits + found > after.get(choice, -1):
                        after[choice] = hits + found
        states = after
    return max(states.values())


@pytest.mark.parametrize("num_pages", [3, 4])
def test_the_optimum_is_what_trying_everything_finds(num_pages: int) -> None:
    requests = [[0, 1, 2], [0, 3], [0, 1, 4], [5], [0, 3, 6], [0, 1, 2], [5], [0, 3]]
    workload = Workload("small", 1, requests)
    assert optimal_hits(workload, num_pages) == best_by_trial(requests, num_pages)


def test_no_policy_beats_the_optimum_and_room_for_all_reaches_it() -> None:
    workload = Workload("agents", 64, agents().requests[:600])
    (small, whole) = compare(workload, [0.1, 1.0])
    assert small.lru.tokens <= small.optimum
    assert small.policy.tokens <= small.optimum
    assert whole.lru.tokens == whole.policy.tokens == whole.optimum
    assert "| 10% |" in table(workload, [small])


def test_branches_hold_the_least_that_whole_pages_allow() -> None:
    for tail in (32, 200):
        pages = branch_pages(tail)
        assert pages.num_pages == pages.ideal


@pytest.mark.slow
def test_the_policy_beats_lru_where_room_is_scarce() -> None:
    if not TRACE:
        pytest.skip("HEADWATER_MOONCAKE_TRACE does not name the recorded trace")
    workload = read_trace(Path(TRACE))
    for share, at_least in ((0.05, 1.10), (0.1, 1.04), (0.2, 0.99), (0.5, 0.99)):
        num_pages = int(workload.num_unique * share)
        ours = replay(workload, num_pages, ExpectedReuse(workload.page_tokens)).tokens
        lru = replay(workload, num_pages, LeastRecentlyUsed()).tokens
        assert ours >= at_least * lru

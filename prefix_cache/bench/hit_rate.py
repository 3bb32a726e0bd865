"""Hit rate over a workload at several sizes: the policy, LRU, and the optimum that knows the
future."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefix_cache.bench.optimum import optimal_hits
from prefix_cache.bench.traces import Workload
from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import EvictionPolicy, ExpectedReuse, LeastRecentlyUsed
from prefix_cache.key import Namespace

_NAMESPACE = Namespace("bench", "exact", "f16", "bench")


ATTENTION_TOKENS = 4096
"""Depth at which attention doubles the cost of a token; about that of the embedded model."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a cache found: shares of all tokens, and of all computing."""

    tokens: float
    computing: float


@dataclass(frozen=True, slots=True)
class HitRates:
    """At one size of the cache; `optimum` is a share of tokens."""

    budget: float
    policy: Saved
    lru: Saved
    optimum: float


def replay(workload: Workload, num_pages: int, policy: EvictionPolicy) -> Saved:
    """What a cache of that size finds, requests one after another; an id is a page of one token
    here, and costs as many as it stands for."""
    cache = PrefixCache(num_pages, 1, policy)
    slope = workload.page_tokens / ATTENTION_TOKENS
    num_hits, found, total = 0, 0.0, 0.0
    for request in workload.requests:
        tokens = np.array(request[:num_pages], dtype=np.int32)
        match = cache.match(_NAMESPACE, tokens)
        num_hits += match.num_cached_tokens
        found += _cost(match.num_cached_tokens, slope)
        total += _cost(len(request), slope)
        if cache.extend(match.table, len(tokens)) is not None:
            cache.publish(match.table, tokens, len(tokens))
        cache.release(match.table)
    return Saved(num_hits / workload.num_pages, found / total)


def _cost(num_pages: int, slope: float) -> float:
    return num_pages + slope * num_pages * (num_pages - 1) / 2


def compare(workload: Workload, budgets: Sequence[float]) -> list[HitRates]:
    """The rates at shares `budgets` of the workload's unique pages."""
    rates: list[HitRates] = []
    for budget in budgets:
        num_pages = int(workload.num_unique * budget)
        policy = replay(workload, num_pages, ExpectedReuse(workload.page_tokens))
        lru = replay(workload, num_pages, LeastRecentlyUsed())
        optimum = optimal_hits(workload, num_pages) / workload.num_pages
        rates.append(HitRates(budget, policy, lru, optimum))
    return rates


def table(workload: Workload, rates: Sequence[HitRates]) -> str:
    """For people."""
    num_tokens = workload.num_pages * workload.page_tokens
    num_unique = workload.num_unique * workload.page_tokens
    head = f"{workload.name}: {len(workload.requests):,} requests, {num_tokens:,} tokens"
    lines = [f"{head}, {num_unique:,} of them unique", "", _HEADER, "|---|---|---|---|---|---|"]
    lines += [
        f"| {rate.budget:.0%} | {rate.policy.tokens:.2%} "
        f"| {rate.policy.tokens / rate.lru.tokens:.3f} "
        f"| {rate.policy.tokens / rate.optimum:.1%} | {rate.lru.tokens / rate.optimum:.1%} "
        f"| {rate.policy.computing / rate.lru.computing:.3f} |"
        for rate in rates
    ]
    return "\n".join(lines)


_HEADER = (
    "| pages | tokens found | of LRU's | of the optimum | LRU, of the optimum "
    "| computing saved, of LRU's |"
)

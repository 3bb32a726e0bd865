"""How long matching and inserting a long prompt takes, beside a chain of SHA-256 over pages."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import numpy as np
from numpy.typing import NDArray

from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse
from prefix_cache.key import Namespace

PAGE_SIZE = 16
TREE_TOKENS = 1_000_000
PROMPT_TOKENS = 150_000
TAIL_TOKENS = 512
P = ParamSpec("P")
_NAMESPACE = Namespace("bench", "exact", "f16", "bench")


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of the thread's CPU time over all rounds: other programs do not count."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class LookupTimes:
    """match: finding the prompt and releasing it. whole: match, extend, publish and release of a
    prompt with a tail nobody has seen. evicting: the same in a full pool. insert: match, extend,
    publish and release of a whole unseen prompt in a full pool. sha256: the chain over a whole
    prompt's pages, timed between the rounds."""

    match: Times
    whole: Times
    evicting: Times
    insert: Times
    sha256: Times


def measure(rounds: int) -> LookupTimes:
    """Times in a tree of `TREE_TOKENS` tokens, of prompts of `PROMPT_TOKENS`."""
    rng = np.random.default_rng(1)
    prompts = [_random(rng, PROMPT_TOKENS) for _ in range(TREE_TOKENS // PROMPT_TOKENS)]
    roomy = _used_pool(TREE_TOKENS + rounds * TAIL_TOKENS)
    full = _used_pool(TREE_TOKENS)
    for cache in (roomy, full):
        for prompt in [_random(rng, TREE_TOKENS % PROMPT_TOKENS), *prompts]:
            _insert(cache, prompt)
    match: list[float] = []
    whole: list[float] = []
    evicting: list[float] = []
    sha256: list[float] = []
    for index in range(rounds):
        prompt = prompts[index % len(prompts)].copy()
        match.append(_time(_find, roomy, prompt))
        if index % 10 == 0:
            sha256.append(_time(_sha256_chain, prompt))
    for cache, times in ((roomy, whole), (full, evicting)):
        for index in range(rounds):
            prompt = prompts[index % len(prompts)].copy()
            prompt[-TAIL_TOKENS:] = _random(rng, TAIL_TOKENS)
            times.append(_time(_insert, cache, prompt))
            if index % 10 == 0:
                sha256.append(_time(_sha256_chain, prompt))
    insert = [_time(_insert, full, _random(rng, PROMPT_TOKENS)) for _ in range(rounds)]
    return LookupTimes(*map(_times, (match, whole, evicting, insert, sha256)))


def _used_pool(num_tokens: int) -> PrefixCache:
    """An empty cache of which all memory was touched before."""
    cache = PrefixCache(num_tokens // PAGE_SIZE + 1, PAGE_SIZE, ExpectedReuse(PAGE_SIZE))
    rng = np.random.default_rng(2)
    for _ in range(num_tokens // PROMPT_TOKENS + 1):
        _insert(cache, _random(rng, PROMPT_TOKENS))
    cache.flush()
    return cache


def report(times: LookupTimes) -> str:
    """For people."""
    rows = [
        ("match and release", times.match),
        (f"match, insert a tail of {TAIL_TOKENS}, release", times.whole),
        ("the same in a full pool: evicts as much", times.evicting),
        ("insert and release an unseen prompt there", times.insert),
        ("SHA-256 chain over the pages", times.sha256),
    ]
    lines = [
        f"prompts of {PROMPT_TOKENS:,} tokens in a tree of {TREE_TOKENS:,}, pages of {PAGE_SIZE}",
        "",
        "| what | p50 ms | p99 ms | SHA-256 chain is slower by |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {each.p50:.3f} | {each.p99:.3f} | {times.sha256.p50 / each.p50:.0f}x |"
        for name, each in rows
    ]
    return "\n".join(lines)


def _random(rng: np.random.Generator, num_tokens: int) -> NDArray[np.int32]:
    return rng.integers(0, 50_000, num_tokens, dtype=np.int32)


def _find(cache: PrefixCache, prompt: NDArray[np.int32]) -> None:
    cache.release(cache.match(_NAMESPACE, prompt).table)


def _insert(cache: PrefixCache, prompt: NDArray[np.int32]) -> None:
    table = cache.match(_NAMESPACE, prompt).table
    if cache.extend(table, len(prompt)) is None:
        raise MemoryError("the bench's pool is too small")
    cache.publish(table, prompt, len(prompt))
    cache.release(table)


def _sha256_chain(prompt: NDArray[np.int32]) -> bytes:
    data = prompt.tobytes()
    parent = b""
    for start in range(0, len(data), 4 * PAGE_SIZE):
        parent = hashlib.sha256(parent + data[start : start + 4 * PAGE_SIZE]).digest()
    return parent


def _time(work: Callable[P, object], *given: P.args, **named: P.kwargs) -> float:
    start_ns = time.thread_time_ns()
    work(*given, **named)
    return (time.thread_time_ns() - start_ns) / 1e6


def _times(samples: list[float]) -> Times:
    p50, p99 = np.percentile(samples, [50, 99]).tolist()
    return Times(p50, p99)

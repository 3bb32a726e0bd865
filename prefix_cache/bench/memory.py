"""Pages that branches hold, beside the least that whole pages allow, and bytes of bookkeeping."""

import gc
import tracemalloc
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefix_cache.cache import PageTable, PrefixCache
from prefix_cache.eviction import ExpectedReuse
from prefix_cache.key import Namespace

PAGE_SIZE = 16
PREFIX_TOKENS = 4_007
NUM_BRANCHES = 64
_NAMESPACE = Namespace("bench", "exact", "f16", "bench")


@dataclass(frozen=True, slots=True)
class BranchPages:
    """Pages held by branches on one prefix, the least possible, and how full they are."""

    tail: int
    num_pages: int
    ideal: int
    share_of_slots: float


def branch_pages(tail: int) -> BranchPages:
    """64 running requests on one finished prefix, each with a tail of its own.

    The least: whole pages of the prefix once, and for each branch the pages from the one in which
    the prefix ends; one of the branches goes on in the prefix's own last page.
    """
    cache = PrefixCache(8 * PREFIX_TOKENS, PAGE_SIZE, ExpectedReuse(PAGE_SIZE))
    prefix = np.arange(PREFIX_TOKENS, dtype=np.int32)
    root = _run(cache, prefix)
    cache.publish(root, prefix, PREFIX_TOKENS, tail=True)
    cache.release(root)
    for branch in range(NUM_BRANCHES):
        own = np.full(tail, PREFIX_TOKENS + branch, dtype=np.int32)
        _run(cache, np.concatenate([prefix, own]))
    counts = cache.stats()
    whole, rest = divmod(PREFIX_TOKENS, PAGE_SIZE)
    ideal = whole + NUM_BRANCHES * -(-(rest + tail) // PAGE_SIZE)
    num_pages = counts.referenced + counts.cached
    tokens = whole * PAGE_SIZE + NUM_BRANCHES * (rest + tail)
    return BranchPages(tail, num_pages, ideal, tokens / (num_pages * PAGE_SIZE))


def bytes_per_token(num_tokens: int = 1_000_000, prompt_tokens: int = 4_000) -> float:
    """What tree, pool and what was evicted take per cached token, in a full pool of that size."""
    rng = np.random.default_rng(1)
    gc.collect()
    tracemalloc.start()
    cache = PrefixCache(num_tokens // PAGE_SIZE, PAGE_SIZE, ExpectedReuse(PAGE_SIZE))
    for _ in range(num_tokens // prompt_tokens):
        prompt = rng.integers(0, 50_000, prompt_tokens, dtype=np.int32)
        cache.release(_run(cache, prompt))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (cache.stats().cached * PAGE_SIZE)


def report() -> str:
    """For people."""
    lines = [
        f"{NUM_BRANCHES} branches on a prefix of {PREFIX_TOKENS:,} tokens, pages of {PAGE_SIZE}",
        "",
        "| tail | pages held | least possible | slots that hold tokens |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {each.tail} | {each.num_pages} | {each.ideal} | {each.share_of_slots:.1%} |"
        for each in map(branch_pages, (32, 200))
    ]
    return "\n".join([*lines, "", f"bookkeeping: {bytes_per_token():.1f} bytes per cached token"])


def _run(cache: PrefixCache, tokens: NDArray[np.int32]) -> PageTable:
    table = cache.match(_NAMESPACE, tokens).table
    if cache.extend(table, len(tokens)) is None:
        raise MemoryError("the bench's pool is too small")
    cache.publish(table, tokens, len(tokens))
    return table

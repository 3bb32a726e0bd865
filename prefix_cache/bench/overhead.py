"""What all bookkeeping of a request costs when nothing is ever found: matching, pages chunk by
chunk and token by token, publishing, evicting what others left."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse
from prefix_cache.key import Namespace

PAGE_SIZE = 16
_NAMESPACE = Namespace("bench", "exact", "f16", "bench")


@dataclass(frozen=True, slots=True)
class Overhead:
    """CPU time of a request of so many prompt and output tokens."""

    prompt_tokens: int
    output_tokens: int
    request_us: float


def measure(
    prompt_tokens: int, output_tokens: int, chunk: int = 256, rounds: int = 200
) -> Overhead:
    """In a full pool of 16,384 pages, prompts in chunks, then a token a step."""
    rng = np.random.default_rng(1)
    num_pages = 16_384
    cache = PrefixCache(num_pages, PAGE_SIZE, ExpectedReuse(PAGE_SIZE))
    total = prompt_tokens + output_tokens
    prompts = rng.integers(0, 50_000, (rounds, total), dtype=np.int32)
    fill = rng.integers(0, 50_000, (num_pages * PAGE_SIZE // 2000, 2000), dtype=np.int32)
    for tokens in fill:
        _serve(cache, tokens, 2000, 2000)
    start_ns = time.thread_time_ns()
    for tokens in prompts:
        _serve(cache, tokens, prompt_tokens, chunk)
    spent_ns = time.thread_time_ns() - start_ns
    return Overhead(prompt_tokens, output_tokens, spent_ns / rounds / 1e3)


def report(rows: list[Overhead]) -> str:
    """For people."""
    lines = [
        "| prompt | output | bookkeeping of a request, us of CPU | us per token |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.prompt_tokens} | {row.output_tokens} | {row.request_us:.0f} "
        f"| {row.request_us / (row.prompt_tokens + row.output_tokens):.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _serve(cache: PrefixCache, tokens: NDArray[np.int32], prompt: int, chunk: int) -> None:
    table = cache.match(_NAMESPACE, tokens[:prompt]).table
    done = table.num_tokens
    while done < len(tokens):
        end = min(prompt, done + chunk) if done < prompt else done + 1
        if cache.extend(table, end) is None:
            raise MemoryError("the bench's pool is too small")
        cache.publish(table, tokens, end)
        done = end
    cache.publish(table, tokens, done, tail=True)
    cache.release(table)

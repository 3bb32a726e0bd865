"""What the prefix cache costs where it finds nothing: `python -m engine.cache_bench`.

Two engines over the same model serve prompts that nobody has sent before, in turns, so that what
else the machine does hits both alike: one with its cache, one that neither matches nor publishes.
CPU time is that of the whole process, kernels too. Beside it stands the thread's CPU time inside
the cache's own methods.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.runtime import build_core
from engine.scheduling.core import EngineCore
from engine.text.default_model import find_default_model
from engine.types import EngineConfig, EngineRequest, SamplingParams, pack_tokens
from prefix_cache.cache import Explanation, PageTable, PrefixCache, PrefixMatch
from prefix_cache.explain import MissReason

_METHODS = ("match", "find", "peek", "extend", "publish", "release", "stats")


class _Uncached:
    """Stands in for the methods of a cache that know its trees."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        cache.match = self.match  # type: ignore[method-assign]
        cache.publish = self.publish  # type: ignore[method-assign]
        cache.peek = lambda namespace, token_ids: 0  # type: ignore[method-assign]

    def match(self, namespace: Any, token_ids: Any, limit: int | None = None) -> PrefixMatch:
        table = PageTable(namespace, [], 0)
        self._cache._tables.add(table)
        return PrefixMatch(table, 0, Explanation(MissReason.DISABLED, 0, token_ids[:0]))

    def publish(
        self, table: PageTable, token_ids: Any, num_tokens: int, *, tail: bool = False
    ) -> None:
        """The table's pages stay its own."""


class _Watch:
    """The thread's CPU time inside a cache's methods."""

    def __init__(self, cache: PrefixCache) -> None:
        self.spent_ns = 0
        self._depth = 0
        for name in _METHODS:
            setattr(cache, name, self._timed(getattr(cache, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if self._depth:
                return method(*given, **named)
            self._depth = 1
            start_ns = time.thread_time_ns()
            try:
                return method(*given, **named)
            finally:
                self.spent_ns += time.thread_time_ns() - start_ns
                self._depth = 0

        return timed


def _serve(core: EngineCore, rng: np.random.Generator, num_prompt: int, num_output: int) -> int:
    """Nanoseconds of the process's CPU time for one request."""
    tokens = rng.integers(1000, 40_000, num_prompt).tolist()
    sampling = SamplingParams(num_output, ignore_eos=True)
    start_ns = time.process_time_ns()
    core.add(EngineRequest("bench", pack_tokens(tokens), sampling))
    while core.has_work:
        core.step()
    return time.process_time_ns() - start_ns


def _core(config: EngineConfig) -> EngineCore:
    core = build_core(config)
    assert isinstance(core, EngineCore)
    return core


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.cache_bench", description=__doc__)
    parser.add_argument("--model", default="", help="by default the embedded one")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model or str(find_default_model()), kv_memory_bytes=64 << 20, threads=1
    )
    rng = np.random.default_rng(3)
    cores = [_core(config), _core(config)]
    caches = [core._cache for core in cores]
    _Uncached(caches[1])
    watches = [_Watch(cache) for cache in caches]
    for _ in range(6):
        for core in cores:  # the pool of the first is full then, and it evicts all the time
            _serve(core, rng, given.prompt * 2, 1)
    for watch in watches:
        watch.spent_ns = 0
    spent: list[list[int]] = [[], []]
    for number in range(given.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            spent[which].append(_serve(cores[which], rng, given.prompt, given.output))
    for core in cores:
        core.close()
    on, off = (statistics.median(each) / 1e6 for each in spent)
    ratios = sorted(a / b for a, b in zip(*spent, strict=True))
    ratio = statistics.median(ratios)
    reach = round(len(ratios) ** 0.5)  # order statistics: 19 of 20 times the median is between
    middle = len(ratios) // 2
    low, high = ratios[max(0, middle - reach)], ratios[min(len(ratios) - 1, middle + reach)]
    inside = [watch.spent_ns / given.rounds / 1e3 for watch in watches]
    more = (inside[0] - inside[1]) / off / 10
    lines = [
        f"{given.prompt} tokens in, {given.output} out, {given.rounds} pairs",
        f"CPU time of a request: {on:.1f} ms with the cache, {off:.1f} ms without",
        f"median ratio of pairs: {ratio:.4f}, between {low:.4f} and {high:.4f}",
        f"in the cache: {inside[0]:.0f} us with it, {inside[1]:.0f} us without, {more:.3f} % more",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

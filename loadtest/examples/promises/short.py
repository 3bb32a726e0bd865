"""Short prompts under a flood of long ones: what they wait."""

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Final

from loadtest.examples.promises.figures import Sheet, quantile
from loadtest.examples.promises.server import Asked, ask, open_http, serving
from loadtest.workloads.text import words

SHORT_TOKENS: Final = 60
LONG_TOKENS: Final = 3000
NUM_LONG: Final = 8
OUTPUT_TOKENS: Final = 16
PAUSE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    lone: int = 20
    flood_s: float = 20.0


async def measure(plan: Plan, sheet: Sheet) -> None:
    """Short prompts one after another, alone and while NUM_LONG clients send long ones."""
    seed = f"{time.time_ns():x}"
    numbers = itertools.count()
    shorts: list[Asked] = []
    longs: list[Asked] = []
    async with serving("short") as server, open_http() as http:

        async def one(num_tokens: int) -> Asked:
            return await ask(http, server, words(num_tokens, seed, next(numbers)), OUTPUT_TOKENS)

        lone = [await one(SHORT_TOKENS) for _ in range(plan.lone)]
        lone_long = await one(LONG_TOKENS)
        end_s = time.perf_counter() + plan.flood_s

        async def flood() -> None:
            while time.perf_counter() < end_s:
                longs.append(await one(LONG_TOKENS))

        floods = [asyncio.create_task(flood()) for _ in range(NUM_LONG)]
        await asyncio.sleep(PAUSE_S)
        while time.perf_counter() < end_s:
            shorts.append(await one(SHORT_TOKENS))
            await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*floods)
    alone_ms = 1e3 * quantile([each.ttft_s for each in lone], 0.5)
    times_ms = [1e3 * each.ttft_s for each in shorts if each.good]
    p50, p95 = quantile(times_ms, 0.5), quantile(times_ms, 0.95)
    long_ms = 1e3 * quantile([each.ttft_s for each in longs if each.good], 0.5)
    sheet.say(
        f"{len(times_ms)} prompts of {SHORT_TOKENS} tokens beside {NUM_LONG} clients that send "
        f"{LONG_TOKENS}: first token after {p50:.0f} ms (p50), {p95:.0f} ms (p95)"
    )
    sheet.say(
        f"alone {alone_ms:.0f} ms, so {p50 / alone_ms:.1f} and {p95 / alone_ms:.1f} times that; a "
        f"long prompt takes {1e3 * lone_long.ttft_s:.0f} ms alone and {long_ms:.0f} ms here"
    )
    sheet.judge("short prompts wait for no long one: p95", p95, 1e3 * lone_long.ttft_s, "ms")
    failed = len(shorts) - len(times_ms) + sum(not each.good for each in longs)
    sheet.judge("requests that failed", failed, 0, "")

"""Ten times what the server can do: who is let in, who is refused and how soon, and the time after.

Requests come at their times whatever the server does; the client runs on the same cores and is
part of each figure.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from loadtest.examples.promises.figures import Sheet, quantile
from loadtest.examples.promises.server import Asked, Server, ask, open_http, serving
from loadtest.measure.memory import tree_pss_bytes
from loadtest.workloads.text import words

PROMPT_TOKENS: Final = 200
LARGE_TOKENS: Final = 1600
"""Of one that comes back: it has to wait for much of the queue."""
OUTPUT_TOKENS: Final = 32
TTFT_MS: Final = 2000.0
NUM_CLIENTS: Final = 32
RAMP_S: Final = 2.0
UNDER_WAY_S: Final = 0.1
"""What was sent is decided upon by then."""
TIMES: Final = 10.0
POLL_S: Final = 0.01
MEMORY_TICK_S: Final = 1.0
MEMORY_SETTLED: Final = 1 / 4
"""Memory grows while buffers and pages are first used; after that part of the time it is flat."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: seconds of full speed, of the flood, and short floods that end with a
    client that comes back."""

    full_s: float = 10.0
    flood_s: float = 60.0
    returns: int = 8
    return_flood_s: float = 2.0


@dataclass(slots=True)
class _Load:
    server: Server
    http: aiohttp.ClientSession
    seed: str = field(default_factory=lambda: f"{time.time_ns():x}")
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    answered: list[Asked] = field(default_factory=list)
    """By `full_speed`."""

    async def one(self, num_tokens: int = PROMPT_TOKENS) -> Asked:
        prompt = words(num_tokens, self.seed, next(self.numbers))
        return await ask(self.http, self.server, prompt, OUTPUT_TOKENS)

    async def full_speed(self, seconds: float) -> float:
        """Answers per second of NUM_CLIENTS that send one request after another, once all do."""
        begin_s = time.perf_counter() + RAMP_S
        ends: list[float] = []

        async def client() -> None:
            while time.perf_counter() < begin_s + seconds:
                asked = await self.one()
                if asked.good:
                    ends.append(asked.end_s)
                    self.answered.append(asked)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        return sum(begin_s <= end_s < begin_s + seconds for end_s in ends) / seconds

    async def flood(self, per_s: float, seconds: float) -> list["asyncio.Task[Asked]"]:
        """Requests at random times, `per_s` on the average; all of them, ended or not."""
        rng = random.Random(self.seed)
        due_s = time.perf_counter()
        end_s = due_s + seconds
        sent = []
        while (due_s := due_s + rng.expovariate(per_s)) < end_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            sent.append(asyncio.create_task(self.one()))
        return sent

    async def come_back(self, per_s: float, seconds: float) -> tuple[float, float] | None:
        """When the flood ends, what the last refusal said, and when the same request was taken,
        nobody else coming. None where the last one was not refused."""
        sent = await self.flood(per_s, seconds)
        await asyncio.sleep(UNDER_WAY_S)
        refused = await self.one(LARGE_TOKENS)
        if refused.status != 503:
            await asyncio.gather(*sent)
            return None
        while True:
            asked_s = time.perf_counter()
            if await self._is_taken():
                break
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*sent)
        return refused.retry_s, asked_s - refused.end_s

    async def _is_taken(self) -> bool:
        """Whether a request is let in; it is given up then."""
        task = asyncio.create_task(self.one(LARGE_TOKENS))
        done, _ = await asyncio.wait([task], timeout=0.06)
        if done:
            return task.result().status == 200
        task.cancel()
        return True


async def measure(plan: Plan, sheet: Sheet) -> None:
    """All of it."""
    # Pages are memory once they were used: few of them, so that they all are when the flood begins.
    options = ("--ttft-target-ms", f"{TTFT_MS:g}", "--kv-memory", "512MiB")
    async with serving("overload", *options) as server, open_http() as http:
        load = _Load(server, http)
        await load.full_speed(1.0)
        full = await load.full_speed(plan.full_s)
        sheet.say(f"full speed: {full:.1f} answers/s; then {TIMES * full:.0f} requests/s")
        await load.full_speed(plan.full_s)  # the same once more, for the pages
        memory: list[float] = []
        watch = asyncio.create_task(_watch_memory(server.pid, memory.append))
        sent = await load.flood(TIMES * full, plan.flood_s)
        watch.cancel()
        await asyncio.sleep(1.0)
        # What the flood left behind counts too: it is served first.
        begin_s = time.perf_counter()
        speed = asyncio.create_task(load.full_speed(plan.full_s))
        asked = await asyncio.gather(*sent)
        await speed
        answered = [*asked, *load.answered]
        end_s = begin_s + RAMP_S + plan.full_s
        after = sum(begin_s <= each.end_s < end_s and each.good for each in answered) / (
            end_s - begin_s
        )
        returns = [
            await load.come_back(TIMES * full, plan.return_flood_s) for _ in range(plan.returns)
        ]
    _judge(sheet, asked, memory, after / full)
    _judge_returns(sheet, [each for each in returns if each is not None])


def _judge(sheet: Sheet, asked: list[Asked], memory: list[float], after: float) -> None:
    good = [each for each in asked if each.good]
    refused = [each for each in asked if each.status == 503]
    in_time = sum(each.ttft_s * 1e3 <= TTFT_MS for each in good) / max(1, len(good))
    refusals_ms = [1e3 * (each.end_s - each.sent_s) for each in refused]
    settled = memory[int(len(memory) * MEMORY_SETTLED) :]
    sheet.say(
        f"{len(asked)} requests: {len(good)} answered, {len(refused)} refused, "
        f"{len(asked) - len(good) - len(refused)} failed otherwise; first token p50 "
        f"{1e3 * quantile([each.ttft_s for each in good], 0.5):.0f} ms, p99 "
        f"{1e3 * quantile([each.ttft_s for each in good], 0.99):.0f} ms; refusals p50 "
        f"{quantile(refusals_ms, 0.5):.1f} ms, p95 "
        f"{quantile(refusals_ms, 0.95):.1f} ms, longest {max(refusals_ms, default=0.0):.0f} ms"
    )
    failed = len(asked) - len(good) - len(refused)
    sheet.judge("admitted that kept the time to first token", 100 * in_time, 99, "%", least=True)
    sheet.judge("refusals, p99", quantile(refusals_ms, 0.99), 50, "ms")
    sheet.judge("requests that failed otherwise", failed, 0, "")
    growth = 100 * (max(settled) / min(settled) - 1) if settled else 0.0
    sheet.judge(
        f"memory ({max(memory):.0f} MiB at most) between lowest and highest", growth, 5, "%"
    )
    sheet.judge("speed 1 s after the flood, of full speed", 100 * after, 95, "%", least=True)


def _judge_returns(sheet: Sheet, returns: list[tuple[float, float]]) -> None:
    sheet.say(
        "told to come back after, and taken after, s: "
        + ", ".join(f"{told_s:.2f} {true_s:.2f}" for told_s, true_s in returns)
    )
    off = [abs(told_s - true_s) / max(true_s, 1e-9) for told_s, true_s in returns]
    sheet.judge("retry-after-ms off the truth, median", 100 * quantile(off, 0.5), 30, "%")


async def _watch_memory(pid: int, note: Callable[[float], None]) -> None:
    while True:
        note(await asyncio.to_thread(tree_pss_bytes, pid) / 2**20)
        await asyncio.sleep(MEMORY_TICK_S)

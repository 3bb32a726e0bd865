"""`python -m loadtest`: agents in a closed loop, each sends a turn when the last is answered."""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import httpx

from loadtest.client import Sample, stream_chat
from loadtest.report import Row, summarise, table
from loadtest.workload import Workload


def main() -> int:
    """Run the load and print its table; 1 when a request failed, 2 when there is no server."""
    options = parse()
    try:
        rows = asyncio.run(run_all(options))
    except httpx.HTTPError as error:
        print(f"loadtest: no server answers at {options.url}: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.num_errors for row in rows) else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one the server lists")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prefix-words", type=int, default=500, help="of the shared system prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: a new prefix")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds between two chunks")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


async def run_all(options: argparse.Namespace) -> list[Row]:
    """One row per concurrency; each run has a system prompt that no server has seen."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=options.timeout, limits=limits, trust_env=False) as http:
        listed = (await http.get(f"{options.url}/v1/models")).raise_for_status().json()
        model = options.model or listed["data"][0]["id"]
        rows = []
        for concurrency in options.concurrency:
            workload = Workload(
                num_agents=concurrency,
                num_turns=options.turns,
                prefix_words=options.prefix_words,
                max_tokens=options.max_tokens,
                seed=options.seed * 1000 + concurrency,
            )
            start_s = time.perf_counter()
            samples = await run(http, options.url, model, workload)
            for message in sorted({s.error for s in samples if s.error}):
                print(f"loadtest: {message}", file=sys.stderr)
            rows.append(summarise(concurrency, samples, time.perf_counter() - start_s))
    return rows


async def run(http: httpx.AsyncClient, url: str, model: str, workload: Workload) -> list[Sample]:
    """All agents at once, each turn after turn; an agent whose turn failed stops."""
    system = workload.system_prompt()

    async def agent_loop(agent: int) -> list[Sample]:
        messages = [{"role": "system", "content": system}]
        samples: list[Sample] = []
        for turn in range(workload.num_turns):
            messages.append({"role": "user", "content": workload.user_turn(agent, turn)})
            body: dict[str, object] = {
                "model": model,
                "messages": messages,
                "max_tokens": workload.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            sample = await stream_chat(http, url, body, agent, turn)
            samples.append(sample)
            if sample.error is not None:
                break
            messages.append({"role": "assistant", "content": sample.text})
        return samples

    loops = [agent_loop(agent) for agent in range(workload.num_agents)]
    return [sample for samples in await asyncio.gather(*loops) for sample in samples]


if __name__ == "__main__":
    sys.exit(main())

"""vllm#16016, CVE-2025-46570: the time to the first token told whether another tenant's prompt was
cached; a salt from the body could be set by the attacker."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.types import EngineRequest, SamplingParams, TokenDelta, pack_tokens
from service.access.keys import hash_key, key_entry, new_key
from tests.e2e.conftest import serve
from tests.engine.tiny import Driver, prompt, tiny_core

BLOCK = 10
"""Prompts that one tenant sends before another asks for them and for as many unseen ones."""


def cached(run: Driver, tokens: list[int], tenant: str, salt: str = "") -> int:
    request_id = run.add(tokens, 2, tenant=tenant, salt=salt)
    run.run()
    started = run.answers[request_id].started
    assert started is not None
    return started.num_cached_tokens


def test_another_tenants_prompt_is_as_if_it_were_not_there() -> None:
    run = Driver(tiny_core())
    tokens = prompt(14, 200)
    assert cached(run, tokens, "T1", "secret") == 0
    for salt in ("", "secret"):
        assert cached(run, tokens, "T2", salt) == 0
    assert cached(run, tokens, "T1") == 0
    assert cached(run, tokens, "T1", "secret") == len(tokens) - 1
    assert cached(run, tokens, "T2", "secret") == len(tokens) - 1, "its own by now"


def test_what_others_compute_now_is_not_followed() -> None:
    """Two tenants with the same prompt at the same time compute it twice."""
    run = Driver(tiny_core(token_budget=32))
    tokens = prompt(15, 150)
    ids = [run.add(tokens, 2, tenant=tenant) for tenant in ("T1", "T2")]
    run.run()
    for request_id in ids:
        started = run.answers[request_id].started
        assert started is not None and started.num_cached_tokens == 0
    assert run.core.stats().num_computed_tokens == 2 * (len(tokens) + 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_time_to_the_first_token_tells_nothing() -> None:
    """A thousand prompts that another tenant has cached and a thousand that nobody has, in
    random order."""
    num_samples = 1000
    run = Driver(tiny_core(num_pages=256))
    rng = np.random.default_rng(14)
    times: dict[bool, list[int]] = {True: [], False: []}
    known = [True] * num_samples + [False] * num_samples
    rng.shuffle(known)
    for number, is_known in enumerate(known):
        tokens = prompt(10_000 + number, 64)
        other = tokens if is_known else prompt(50_000 + number, 64)
        run.add(other, 1, tenant="T1")
        run.run()
        start_ns = time.perf_counter_ns()
        run.core.add(_request(number, tokens))
        while not any(isinstance(event, TokenDelta) for event in run.core.step()):
            pass
        times[is_known].append(time.perf_counter_ns() - start_ns)
        while run.core.has_work:
            run.core.step()
    low = np.array(times[True])[:, None] < np.array(times[False])[None, :]
    assert 0.45 <= low.mean() <= 0.55


def _request(number: int, tokens: list[int]) -> EngineRequest:
    sampling = SamplingParams(1, ignore_eos=True)
    return EngineRequest(f"probe{number}", pack_tokens(tokens), sampling, tenant="T2")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_over_http_the_time_to_the_first_token_tells_nothing(tmp_path: Path) -> None:
    """The same with keys, sockets and the real model, HEADWATER_TIMING_SAMPLES of each (1,000)."""
    num_samples = int(os.environ.get("HEADWATER_TIMING_SAMPLES", "1000"))
    keys = {tenant: new_key() for tenant in ("north", "south")}
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(key_entry(hash_key(k), t, False) for t, k in keys.items()) + "\n")
    rng = np.random.default_rng(14)
    times: dict[bool, list[float]] = {True: [], False: []}
    with (
        serve("--keys", str(file), "--kv-memory", "128MiB") as server,
        ThreadPoolExecutor(BLOCK) as north,
    ):

        def first_token_s(tenant: str, tokens: list[int]) -> float:
            body = {"model": "default", "prompt": tokens, "max_tokens": 1, "stream": True}
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            start_s = time.perf_counter()
            with server.http.stream(
                "POST", "/v1/completions", json=body, headers=headers, timeout=600
            ) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                next(line for line in lines if line.startswith("data: "))
                took_s = time.perf_counter() - start_s
                for _ in lines:
                    pass
            return took_s

        for _ in range(num_samples // BLOCK):
            prompts = [rng.integers(1000, 40_000, 64).tolist() for _ in range(2 * BLOCK)]
            list(north.map(lambda tokens: first_token_s("north", tokens), prompts[:BLOCK]))
            for number in rng.permutation(2 * BLOCK).tolist():
                times[number < BLOCK].append(first_token_s("south", prompts[number]))
    low = np.array(times[True])[:, None] < np.array(times[False])[None, :]
    medians = (np.median(times[True]) * 1e3, np.median(times[False]) * 1e3)
    told = f"AUC {low.mean():.3f}, medians {medians[0]:.1f} and {medians[1]:.1f} ms"
    sys.stdout.write(f"{told}\n")
    assert 0.45 <= low.mean() <= 0.55, told

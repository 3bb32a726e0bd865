"""A warm prompt costs its tail: the time to the first token over HTTP, beside the kernel's own time
for that chunk over that past, taken in turns."""

import statistics
import sys
import time

import numpy as np
import pytest

from kernels.bench import SMOL, Bench, Part, make_batch
from kernels.contract import WeightType
from kernels.cpu.backend import CpuBackend
from tests.e2e.conftest import serve

PAST, TAIL, THREADS, ROUNDS = 4000, 32, 2, 25


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prefix_of_4000_tokens_costs_the_time_of_its_tail() -> None:
    rng = np.random.default_rng(5)
    prefix = rng.integers(1000, 40_000, PAST).tolist()
    with serve("--threads", str(THREADS), "--kv-memory", "512MiB") as server:

        def first_token_ms(tokens: list[int]) -> float:
            body = {"model": "default", "prompt": tokens, "max_tokens": 1, "stream": True}
            start_s = time.perf_counter()
            with server.http.stream("POST", "/v1/completions", json=body) as got:
                assert got.status_code == 200
                lines = got.iter_lines()
                next(line for line in lines if line.startswith("data: "))
                took_ms = (time.perf_counter() - start_s) * 1e3
                for _ in lines:
                    pass
            return took_ms

        first_token_ms(prefix)
        backend = CpuBackend(threads=THREADS)
        try:
            bench = Bench(backend, SMOL, WeightType.Q4_1, PAST + 2 * TAIL, repeats=1)
            batch = make_batch(SMOL, [Part(PAST, TAIL)])
            warm_ms: list[float] = []
            kernel_ms: list[float] = []
            for _ in range(ROUNDS):
                tail = rng.integers(1000, 40_000, TAIL).tolist()
                warm_ms.append(first_token_ms([*prefix, *tail]))
                start_s = time.perf_counter()
                backend.step(bench.model, bench.kv, batch)
                kernel_ms.append((time.perf_counter() - start_s) * 1e3)
        finally:
            backend.close()
    ttft, kernel = statistics.median(warm_ms[3:]), statistics.median(kernel_ms[3:])
    told = f"first token after {ttft:.1f} ms, the kernel alone {kernel:.1f} ms"
    sys.stdout.write(f"{told}\n")
    assert ttft <= 1.15 * kernel + 5, told

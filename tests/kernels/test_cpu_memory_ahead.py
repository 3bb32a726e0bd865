"""The memory of pages is there before it is written, and little more of it than that."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kernels.contract import KVDType, WeightType
from kernels.cpu.backend import CpuBackend
from kernels.random_weights import random_weights
from tests.kernels.small_decoder import SPEC, all_of
from tests.kernels.stepping import kv_layout, make_batch

LAYOUT = kv_layout(SPEC, 16, KVDType.F16)
AHEAD = 40 << 20
SLACK = 8 << 20
"""What else a process may take or give back meanwhile."""
PATIENCE_S = 60.0
"""The thread that does it gets only what others leave of the cores."""


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    gc.collect()  # what other tests have left is not given back while this one looks
    backend = CpuBackend(threads=1, exact=True)
    yield backend
    backend.close()


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the system does not say what a process has of memory")


def settled(enough: Callable[[int], bool]) -> int:
    """The memory of this process, once that is enough and has not changed for a while."""
    end_s = time.monotonic() + PATIENCE_S
    last, since_s = anonymous_bytes(), time.monotonic()
    while time.monotonic() - since_s < 0.3 or not enough(last):
        assert time.monotonic() < end_s, f"{last} bytes are not enough"
        time.sleep(0.01)
        now = anonymous_bytes()
        if abs(now - last) > SLACK / 8:
            last, since_s = now, time.monotonic()
    return last


def test_what_is_written_next_is_there_and_no_more(backend: CpuBackend) -> None:
    model = backend.load(
        SPEC, random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.F32))
    )
    before = anonymous_bytes()
    kv = backend.alloc_kv(LAYOUT, 3 * AHEAD // LAYOUT.page_bytes)
    grown = settled(lambda now: now >= before + AHEAD - SLACK) - before
    assert grown < AHEAD + SLACK
    page = AHEAD // 2 // LAYOUT.page_bytes
    backend.step(model, kv, make_batch([([5], 0, [page])], 16))
    grown = settled(lambda now: now >= before + 3 * AHEAD // 2 - SLACK) - before
    assert grown < 3 * AHEAD // 2 + SLACK

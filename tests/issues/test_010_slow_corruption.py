"""text-generation-inference#2871: answers grew odd after days of uptime, from edge cases of the
prefix cache. HEADWATER_SOAK_S lengthens the soak: 1800 for the half hour of the report."""

import os
import random
import time

import pytest

from engine.types import FinishReason, KeepPrefix
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

SECONDS = float(os.environ.get("HEADWATER_SOAK_S", "60"))


def tree(rng: random.Random, trunks: list[list[int]]) -> list[int]:
    """A prompt that goes on from a random place of a random former one."""
    trunk = rng.choice(trunks)
    grown = trunk[: rng.randint(1, len(trunk))] + prompt(rng.randrange(10**6), rng.randint(1, 40))
    trunks[rng.randrange(len(trunks))] = grown[:120]
    return grown[:130]


def soak(seconds: float, seed: int) -> int:
    """Constant eviction, to disk and back, leases, a tenth of cancels; every 50th answer against a
    cold twin. How many were compared."""
    rng = random.Random(seed)
    trunks = [prompt(seed + n, 60) for n in range(8)]
    run = Driver(tiny_core(num_pages=24, max_context=10 * PAGE, max_running=6, cache_disk_pages=60))
    end_s, num_asked, num_compared = time.monotonic() + seconds, 0, 0
    wanted: dict[str, list[int]] = {}
    while time.monotonic() < end_s:
        for _ in range(rng.randint(1, 4)):
            tokens = tree(rng, trunks)
            keep = (KeepPrefix(-1, rng.random()),) if rng.random() < 0.1 else ()
            request_id = run.add(tokens, rng.randint(1, 12), keep=keep)
            wanted[request_id] = tokens
            if rng.random() < 0.1:
                run.step()
                run.core.abort(request_id)
        run.run()
        for request_id, tokens in wanted.items():
            answer = run.answers.pop(request_id)
            assert answer.finished is not None
            num_asked += 1
            if num_asked % 50 == 0 and answer.finished.reason is not FinishReason.ABORT:
                twin = Driver(tiny_core()).answer(tokens, max(len(answer.tokens), 1))
                assert answer.tokens == twin.tokens[: len(answer.tokens)]
                num_compared += 1
        wanted.clear()
        assert run.core.stats().pool.referenced == 0
    return num_compared


def test_a_moment_of_it() -> None:
    assert soak(2.0, 10) > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_long_soak() -> None:
    assert soak(SECONDS, 11) > SECONDS / 4

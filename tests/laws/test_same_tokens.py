"""Law 1: however a request is computed, its tokens are the same, and on the CPU backend so are the
bits of its log-probabilities."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.types import SamplingParams
from kernels.contract import BackendUnavailable
from kernels.registry import select_backend
from tests.engine.tiny import PAGE, Answer, Driver, prompt, tiny_core

GREEDY = SamplingParams(24, ignore_eos=True, logprobs=3)
SAMPLED = msgspec.structs.replace(GREEDY, temperature=0.9, top_k=30, top_p=0.95, seed=11)
LENGTHS = (1, 7, 8, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 100, 255, 257)


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        select_backend(request.param, threads=1, exact=False).backend.close()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return str(request.param)


def driver(backend: str, **options: Any) -> Driver:
    return Driver(tiny_core(selection=select_backend(backend, threads=1, exact=False), **options))


def same(backend: str, one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert one.text == other.text
    if backend == "cpu":
        assert one.logprobs == other.logprobs
    assert one.finished is not None and other.finished is not None
    assert one.finished.reason == other.finished.reason


def alone(run: Driver, tokens: list[int], sampling: SamplingParams) -> Answer:
    request_id = run.add(tokens, sampling=sampling)
    run.run()
    return run.answers[request_id]


def cold(backend: str, tokens: list[int], sampling: SamplingParams) -> Answer:
    return alone(driver(backend, token_budget=512), tokens, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=("greedy", "sampled"))
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_and_warm(backend: str, length: int, sampling: SamplingParams) -> None:
    tokens = prompt(length, length)
    expected = cold(backend, tokens, sampling)
    for budget in (1, 7, PAGE - 1, PAGE, PAGE + 1, 40, 64):
        run = driver(backend, token_budget=budget)
        same(backend, alone(run, tokens, sampling), expected)
        warm = alone(run, tokens, sampling)
        same(backend, warm, expected)
        assert warm.started is not None
        assert warm.started.num_cached_tokens == length - 1
        run.assert_idle()


@pytest.mark.parametrize("kept", [1, PAGE - 1, PAGE, PAGE + 1, 99, 100])
def test_warm_from_a_part(backend: str, kept: int) -> None:
    """A prefix of any length is cached, by a request that went on differently."""
    tokens = prompt(1, 100)
    expected = cold(backend, tokens, GREEDY)
    run = driver(backend)
    alone(run, tokens[:kept] + [t % 100 + 1 for t in tokens[kept:]] + [5], GREEDY)
    warm = alone(run, tokens, GREEDY)
    same(backend, warm, expected)
    assert warm.started is not None
    assert warm.started.num_cached_tokens >= min(kept, 99)
    run.assert_idle()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=("greedy", "sampled"))
def test_batched(backend: str, sampling: SamplingParams) -> None:
    """All lengths and both samplings in one batch, arriving over time."""
    run = driver(backend, num_pages=200, token_budget=96)
    ids = []
    for length in LENGTHS:
        ids.append(run.add(prompt(length, length), sampling=sampling))
        run.add(prompt(length + 1000, 50), sampling=SAMPLED if sampling is GREEDY else GREEDY)
        run.step()
    run.run()
    for length, request_id in zip(LENGTHS, ids, strict=True):
        same(backend, run.answers[request_id], cold(backend, prompt(length, length), sampling))
    run.assert_idle()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=("greedy", "sampled"))
def test_preempted(backend: str, sampling: SamplingParams) -> None:
    sampling = msgspec.structs.replace(sampling, max_tokens=60)
    run = driver(backend, num_pages=10, max_context=10 * PAGE)
    ids = [run.add(prompt(i, 30), sampling=sampling) for i in range(3)]
    run.run()
    assert run.core.stats().num_preemptions > 0
    for i, request_id in enumerate(ids):
        same(backend, run.answers[request_id], cold(backend, prompt(i, 30), sampling))
    run.assert_idle()


@pytest.mark.parametrize("fork_at", [PAGE * 3, PAGE * 3 + 1, PAGE * 4 - 1])
def test_forked(backend: str, fork_at: int) -> None:
    """Branches go on from one conversation at once, from inside a page too; one of them takes the
    page over, the others write into copies, and the parent is asked again while they run."""
    parent = prompt(9, fork_at - 20)
    run = driver(backend)
    first = alone(run, parent, msgspec.structs.replace(GREEDY, max_tokens=21))
    trunk = (parent + first.tokens)[:fork_at]
    branches = [trunk, *(trunk + prompt(50 + i, 7 * i + 1) for i in range(4))]
    ids = [run.add(branch, sampling=GREEDY) for branch in branches]
    run.run()
    for branch, request_id in zip(branches, ids, strict=True):
        started = run.answers[request_id].started
        assert started is not None and started.num_cached_tokens >= fork_at - 1
        same(backend, run.answers[request_id], cold(backend, branch, GREEDY))
    run.assert_idle()


def test_two_asked_the_same_at_once(backend: str) -> None:
    """Warm twins: one full match each, the same page read by both and then written by one."""
    tokens = prompt(4, 70)
    run = driver(backend)
    expected = alone(run, tokens, GREEDY)
    ids = [run.add(tokens, sampling=GREEDY) for _ in range(3)]
    run.run()
    for request_id in ids:
        same(backend, run.answers[request_id], expected)
    run.assert_idle()


@pytest.mark.parametrize("ends", [lambda seed: seed % 3, lambda seed: 2])
def test_evicted_and_computed_again(backend: str, ends: Callable[[int], int]) -> None:
    """A pool that must evict all the time; each answer equals the cold one."""
    run = driver(backend, num_pages=16, max_context=16 * PAGE)
    for turn in range(12):
        seed = ends(turn)
        tokens = prompt(seed, 120 + 20 * seed)
        same(backend, alone(run, tokens, GREEDY), cold(backend, tokens, GREEDY))
        alone(run, prompt(100 + turn, 150), GREEDY)
    run.assert_idle()

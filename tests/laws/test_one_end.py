"""Law 3: every request ends with exactly one Finished, on every path. The driver of these tests
fails on any event after it, and `assert_idle` where there was none."""

import random
from collections.abc import Callable
from time import monotonic_ns

import msgspec
import numpy as np
import pytest

from engine.api import EngineError
from engine.types import EngineRequest, Finished, FinishReason, SamplingParams, pack_tokens
from kernels.contract import ForwardBatch, StepLogits, do_nothing
from kernels.registry import Selection
from tests.engine.tiny import (
    EOS,
    PAGE,
    Driver,
    FaultyBackend,
    faulty,
    prompt,
    tiny_core,
)

LONG = SamplingParams(40, ignore_eos=True)


def end_of(run: Driver, request_id: str) -> Finished:
    finished = run.answers[request_id].finished
    assert finished is not None
    return finished


def test_length_and_nothing_to_generate() -> None:
    run = Driver(tiny_core())
    length = run.add(prompt(1, 40), 5)
    nothing = run.add(prompt(2, 40), 0)
    again = run.add(prompt(2, 40), 0)
    run.run()
    assert end_of(run, length).reason is FinishReason.LENGTH
    for request_id in (nothing, again):
        end = end_of(run, request_id)
        assert (end.reason, end.num_output_tokens) == (FinishReason.LENGTH, 0)
        assert run.answers[request_id].started is not None
    run.assert_idle()


def test_stop_token_and_eos() -> None:
    run = Driver(tiny_core())
    tokens = run.answer(prompt(1, 40), 30).tokens
    stop = tokens[5]
    at = tokens.index(stop)
    request_id = run.add(
        prompt(1, 40), sampling=SamplingParams(30, stop_token_ids=(stop,), ignore_eos=True)
    )
    run.run()
    end, answer = end_of(run, request_id), run.answers[request_id]
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert answer.tokens == tokens[: at + 1]
    assert answer.text == bytes(t for t in tokens[:at] if t != EOS)
    run.assert_idle()


@pytest.mark.parametrize("abort_at", range(12))
def test_abort_in_each_phase(abort_at: int) -> None:
    """Before the first step, in each of the chunks, in decode, after the end."""
    run = Driver(tiny_core(token_budget=PAGE))
    request_id = run.add(prompt(1, 5 * PAGE), 4)
    neighbour = run.add(prompt(2, 20), 30)
    for _ in range(abort_at):
        run.step()
    ended = run.answers[request_id].finished
    run.core.abort(request_id)
    run.step()
    assert run.answers[request_id].finished is not None
    if ended is None:
        assert end_of(run, request_id).reason is FinishReason.ABORT
    run.run()
    assert end_of(run, neighbour).reason is FinishReason.LENGTH
    run.assert_idle()


def test_abort_on_the_last_token() -> None:
    """500 interleavings of aborts with steps around the end: one end each, of either kind."""
    rng = random.Random(5)
    run = Driver(tiny_core(num_pages=32))
    seen = set()
    for _ in range(500):
        num_prompt, max_tokens = rng.randint(1, 3), rng.randint(1, 3)
        request_id = run.add(prompt(rng.randint(0, 3), num_prompt), max_tokens)
        for _ in range(rng.randint(0, max_tokens)):
            run.step()
        for _ in range(rng.randint(1, 3)):
            run.core.abort(request_id)
        run.run()
        run.core.abort(request_id)
        seen.add((end_of(run, request_id).reason, end_of(run, request_id).num_output_tokens))
    assert not run.core.has_work
    assert {reason for reason, _ in seen} == {FinishReason.ABORT, FinishReason.LENGTH}
    run.assert_idle()


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_deadline_while_waiting_and_while_running(
    steps: int,
) -> None:
    now_ns = 1_000_000
    run = Driver(tiny_core(token_budget=PAGE, max_running=1, clock_ns=lambda: now_ns))
    runs = run.add(prompt(1, 60), sampling=LONG, deadline_ns=now_ns + 5)
    waits = run.add(prompt(2, 60), sampling=LONG, deadline_ns=now_ns + 4)
    endless = run.add(prompt(3, 60), sampling=LONG)
    for _ in range(steps):
        run.step()
    assert run.core.wake_ns == now_ns + 4
    for request_id, since in ((waits, 4), (runs, 1)):
        now_ns += since
        run.step()
        end = end_of(run, request_id)
        assert (end.reason, end.time_ns) == (FinishReason.DEADLINE, now_ns)
    assert run.core.wake_ns == 0
    run.run()
    assert end_of(run, endless).reason is FinishReason.LENGTH
    run.assert_idle()


def test_a_deadline_that_has_passed() -> None:
    run = Driver(tiny_core())
    past = run.add(prompt(1, 60), sampling=LONG, deadline_ns=1)
    paused = run.add(prompt(2, 60), sampling=LONG, credits=3, deadline_ns=monotonic_ns() + 10**15)
    assert run.core.wake_ns == 1
    run.run()
    assert end_of(run, past).reason is FinishReason.DEADLINE
    assert run.answers[past].started is None
    assert [phase.name for phase in end_of(run, past).phases] == ["queue"]
    run.core.abort(paused)
    run.run()
    run.assert_idle()


@pytest.mark.parametrize("seed", range(12))
def test_a_fault_at_a_random_step(seed: int) -> None:
    """The step's requests end with ERROR, the others go on, nothing stays referenced, and what
    stays cached is right: the answers asked again equal the cold ones."""
    rng = random.Random(seed)
    bad = {rng.randint(1, 25) for _ in range(3)}
    run = Driver(tiny_core(selection=faulty(bad.__contains__), token_budget=40))
    shared = prompt(1, 50)
    prompts = [shared + prompt(i, rng.randint(1, 60)) for i in range(6)]
    ids = []
    for tokens in prompts:
        ids.append(run.add(tokens, 12))
        run.step()
    run.run()
    reasons = [end_of(run, request_id).reason for request_id in ids]
    assert set(reasons) <= {FinishReason.ERROR, FinishReason.LENGTH}
    assert FinishReason.ERROR in reasons
    for request_id in ids:
        if end_of(run, request_id).reason is FinishReason.ERROR:
            assert "injected at step" in end_of(run, request_id).message
    run.assert_idle()
    bad.clear()
    healthy = Driver(tiny_core())
    for tokens in prompts:
        assert run.answer(tokens, 12).tokens == healthy.answer(tokens, 12).tokens
    run.assert_idle()


@pytest.mark.parametrize("method", ["match", "extend", "peek"])
def test_a_fault_while_planning_ends_all_and_leaves_no_page(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Driver(tiny_core(token_budget=PAGE))
    ids = [run.add(prompt(i, 40), 8) for i in range(3)]
    run.step()
    run.step()
    ids += [run.add(prompt(5 + i, 40), 8) for i in range(2)]

    def broken(*args: object) -> None:
        raise RuntimeError("injected into the plan")

    with monkeypatch.context() as patch:
        patch.setattr(f"prefix_cache.cache.PrefixCache.{method}", broken)
        run.run()
    for request_id in ids:
        assert end_of(run, request_id).reason is FinishReason.ERROR
        assert "injected into the plan" in end_of(run, request_id).message
    assert run.core.audit().referenced == 0
    assert run.answer(prompt(1, 40), 8).tokens == Driver(tiny_core()).answer(prompt(1, 40)).tokens
    run.assert_idle()


def test_aborted_and_late_at_once() -> None:
    run = Driver(tiny_core())
    ids = [run.add(prompt(i, 40), sampling=LONG, deadline_ns=1 + i) for i in range(3)]
    run.core.abort(ids[1])
    run.run()
    reasons = [end_of(run, request_id).reason for request_id in ids]
    assert reasons == [FinishReason.DEADLINE, FinishReason.ABORT, FinishReason.DEADLINE]
    run.assert_idle()


class _NotANumber(FaultyBackend):
    """Spoils the logits of one row of chosen steps."""

    def step(
        self,
        model: object,
        kv: object,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        self.num_steps += 1
        logits = self._backend.step(model, kv, batch, meanwhile)
        if self._fails(self.num_steps):
            if logits.full is not None:
                logits.full[0, 3] = np.nan
            elif logits.logsumexp is not None:
                logits.logsumexp[0] = np.nan
        return logits


@pytest.mark.parametrize("logprobs", [None, 2])
def test_logits_that_are_not_finite(logprobs: int | None) -> None:
    real = faulty(lambda step: False)
    backend = _NotANumber(real.backend, lambda step: step == 4)
    run = Driver(tiny_core(selection=Selection(backend, real.name, real.reason)))
    sampling = msgspec.structs.replace(LONG, logprobs=logprobs)
    spoilt = run.add(prompt(1, 20), sampling=sampling)
    neighbour = run.add(prompt(2, 20), sampling=sampling)
    run.run()
    assert end_of(run, spoilt).reason is FinishReason.ERROR
    assert "not finite" in end_of(run, spoilt).message
    assert len(run.answers[spoilt].tokens) == 3
    assert end_of(run, neighbour).reason is FinishReason.LENGTH
    run.assert_idle()


@pytest.mark.parametrize(
    ("tokens", "sampling", "field"),
    [
        ([], LONG, "token_ids"),
        ([-1], LONG, "token_ids"),
        ([128], LONG, "token_ids"),
        ([2**31 - 1], LONG, "token_ids"),
        ([1] * 64, LONG, "token_ids"),
        ([1] * 65, LONG, "token_ids"),
        ([1], msgspec.structs.replace(LONG, temperature=float("nan")), "temperature"),
        ([1], msgspec.structs.replace(LONG, top_p=0.0), "top_p"),
        ([1], msgspec.structs.replace(LONG, stop=(b"",)), "stop"),
        ([1], msgspec.structs.replace(LONG, max_tokens=-1), "max_tokens"),
    ],
)
def test_refused(tokens: list[int], sampling: SamplingParams, field: str) -> None:
    run = Driver(tiny_core(max_context=64))
    request_id = run.add(tokens, sampling=sampling)
    assert run.core.has_work
    [event] = run.step()
    assert event == end_of(run, request_id)
    assert event.reason is FinishReason.ERROR
    assert field in event.message.split(":")[0]
    assert run.answer([1, 2, 3], 2).finished is not None
    run.assert_idle()


def test_more_than_may_wait_is_refused_and_an_id_is_not_taken_twice() -> None:
    run = Driver(tiny_core(max_running=2, max_waiting=3))
    ids = [run.add(prompt(i, 20), 3) for i in range(6)]
    with pytest.raises(EngineError, match="'r1' is running already"):
        run.core.add(EngineRequest("r1", pack_tokens([1]), LONG))
    run.run()
    reasons = [end_of(run, request_id).reason for request_id in ids]
    assert reasons == [FinishReason.LENGTH] * 5 + [FinishReason.ERROR]
    assert "5 requests" in end_of(run, ids[-1]).message
    run.assert_idle()


@pytest.mark.parametrize("num_prompt", [61, 62, 63])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 100])
def test_the_edge_of_the_context(num_prompt: int, max_tokens: int) -> None:
    """Prompt and output together fill the context of 64 and not one token more."""
    run = Driver(tiny_core(max_context=64, num_pages=4))
    answer = run.answer(prompt(1, num_prompt), max_tokens)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH
    assert len(answer.tokens) == min(max_tokens, 64 - num_prompt)
    run.assert_idle()

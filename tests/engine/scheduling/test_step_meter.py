"""What steps did beside what the machine can: never more than all of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.scheduling.step_meter import StepMeter
from engine.stats import StepWork
from kernels.bench import SMOL
from kernels.contract import KVLayout, WeightType
from kernels.peaks import Peaks
from kernels.roofline import StepCosts, WeightBytes


def metered(peaks: Peaks | None, kernel_ms: list[float]) -> StepMeter:
    """Steps of one sequence that decodes, which took so long."""
    weights = WeightBytes.stored_as(SMOL, lambda _: WeightType.Q8_0, tied=True)
    layout = KVLayout(SMOL.num_layers, SMOL.num_kv_heads, SMOL.head_dim)
    meter = StepMeter(StepCosts(SMOL, weights, layout), peaks)
    request = SimpleNamespace(prefill_end=500)
    chunk: Any = SimpleNamespace(request=request, start=600, end=601, logits=range(600, 601))
    end_ns = 0
    for each in kernel_ms:
        start_ns, end_ns = end_ns, end_ns + int(each * 1.1e6)
        step = meter.note([chunk], start_ns, end_ns, int(each * 1e6))
        check(step)
    return meter


def check(work: StepWork) -> None:
    assert work.memory_ns <= work.kernel_ns + 1 and work.mbu <= 1
    assert work.compute_ns <= work.kernel_ns + 1 and work.mfu <= 1


def test_a_peak_measured_too_low_is_raised_to_what_steps_have_shown() -> None:
    """The step in the middle is the quickest: what was summed before it is judged by it as well."""
    low = Peaks(1e6, 1e6)
    meter = metered(low, [9.0, 3.0, 5.0])
    (work,) = meter.work()
    recent = meter.recent_steps()
    assert len(recent) == 3
    for each in (work, *recent):
        check(each)
    assert recent[1].memory_ns == pytest.approx(3e6, rel=0.01)
    assert recent[0].memory_ns == pytest.approx(3e6, rel=0.01), "the same bytes"
    assert meter.peaks is not None
    assert meter.peaks.bytes_per_s == pytest.approx(work.memory_bytes / 3 / 3e-3, rel=0.01)


def test_a_peak_that_no_step_reached_stays() -> None:
    peaks = Peaks(1e15, 1e18)
    assert metered(peaks, [9.0, 3.0]).peaks == peaks


def test_a_machine_that_was_not_measured_stays_unknown() -> None:
    meter = metered(None, [3.0])
    assert meter.peaks is None
    assert meter.recent_steps()[0].memory_ns == 0

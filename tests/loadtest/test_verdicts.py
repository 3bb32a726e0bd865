"""Assertions and comparisons."""

import math

import pytest

from loadtest import assertions
from loadtest.compare import ratios
from loadtest.measure.pooled import pool
from loadtest.measure.result import Run
from loadtest.measure.sample import Kind
from tests.loadtest.samples import run_of, sample


def run_with_itl(gap_s: float, target: str, repeat: int) -> Run:
    return run_of([sample(times_s=(10.1, 10.1 + gap_s))], target, repeat)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("itl_p50_ms<21", True),
        ("itl_p50_ms <= 19.5", False),
        ("ours: errors == 0", True),
        ("requests>=1e0", True),
        ("requests>1", False),
        ("no_such_figure<1", False),
    ],
)
def test_assertions_hold_or_not(expression: str, holds: bool) -> None:
    (verdict,) = assertions.judge([assertions.parse(expression)], pool([run_of([sample()])]))
    assert verdict.holds is holds


def test_an_assertion_about_one_target_leaves_others_alone() -> None:
    measured = pool([run_of([sample()], "ours"), run_of([sample()], "theirs")])
    (verdict,) = assertions.judge([assertions.parse("theirs:requests<1")], measured)
    assert verdict.target == "theirs"


@pytest.mark.parametrize("text", ["", "itl", "itl<", "<3", "itl_p99_ms<abc", "a<b<3", "itl~3"])
def test_what_is_no_assertion_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an assertion"):
        assertions.parse(text)


def test_ratios_are_of_pairs_with_their_interval() -> None:
    """Ratios 1/2, 1/2 and 1/4: t of two degrees of freedom on their logarithms, by hand."""
    gaps = [(0.01, 0.02), (0.02, 0.04), (0.01, 0.04)]
    runs = []
    for repeat, (ours, theirs) in enumerate(gaps):
        runs += [run_with_itl(ours, "ours", repeat), run_with_itl(theirs, "theirs", repeat)]
    ratio = next(one for one in ratios(runs) if one.figure == "itl_p50_ms")
    assert ratio.num_pairs == 3
    assert ratio.ratio == pytest.approx(2 ** (-4 / 3), rel=5e-3)
    half = 4.303 * math.log(2) * math.sqrt(1 / 3) / math.sqrt(3)
    assert ratio.low is not None and ratio.high is not None
    assert ratio.low == pytest.approx(2 ** (-4 / 3) * math.exp(-half), rel=2e-2)
    assert ratio.high == pytest.approx(2 ** (-4 / 3) * math.exp(half), rel=2e-2)


def test_one_pair_has_no_interval() -> None:
    runs = [run_with_itl(0.01, "ours", 0), run_with_itl(0.02, "theirs", 0)]
    assert {(one.low, one.high) for one in ratios(runs)} == {(None, None)}


def test_a_pair_with_a_failure_is_no_comparison() -> None:
    failed = run_of([sample(), sample(times_s=(), error=Kind.RATE_LIMITED)], "theirs")
    assert ratios([run_with_itl(0.01, "ours", 0), failed]) == []


def test_a_single_target_has_no_ratios() -> None:
    assert ratios([run_with_itl(0.01, "ours", 0)]) == []

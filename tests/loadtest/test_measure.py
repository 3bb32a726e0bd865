"""Figures from samples made by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.measure.histogram import Histogram
from loadtest.measure.pooled import pool
from loadtest.measure.sample import Kind, Usage
from loadtest.workloads import Slo
from tests.loadtest.samples import run_of, sample

durations = st.lists(st.floats(1e-6, 3000.0), min_size=1, max_size=60)


@settings(max_examples=20)
@given(durations, durations)
def test_histograms_add_up_and_travel(first: list[float], second: list[float]) -> None:
    together, a, b = Histogram(), Histogram(), Histogram()
    for duration in first:
        together.record(duration)
        a.record(duration)
    for duration in second:
        together.record(duration)
        b.record(duration)
    a.merge(b.encode())
    assert list(a.curve()) == list(together.curve())
    assert a.count == len(first) + len(second)
    assert a.at(100) == pytest.approx(1e3 * max(first + second), rel=2e-3, abs=2e-3)
    assert list(a.curve())[-1][1] == 1.0


def test_a_text_that_is_no_histogram_is_refused() -> None:
    with pytest.raises(ValueError, match="not an HDR histogram"):
        Histogram("nonsense")


def test_latencies_count_from_when_the_request_was_due() -> None:
    """A client that sends late does not hide the wait of those it kept waiting."""
    run = run_of([sample(due_s=10.0, sent_s=10.09)])
    assert run.figures["ttft_p50_ms"] == pytest.approx(100, rel=1e-3)
    assert run.figures["e2e_p50_ms"] == pytest.approx(140, rel=1e-3)
    assert run.figures["send_p50_ms"] == pytest.approx(90, rel=1e-3)


def test_gaps_tokens_and_rates() -> None:
    run = run_of([sample(turn=0), sample(turn=1, times_s=(10.2, 10.25), usage=Usage(100, 3, 0))])
    figures = run.figures
    assert figures["itl_max_ms"] == pytest.approx(50, rel=2e-3)
    assert figures["tpot_max_ms"] == pytest.approx(25, rel=2e-3)
    assert figures["ttft_first_p50_ms"] == pytest.approx(100, rel=1e-3)
    assert figures["ttft_later_p50_ms"] == pytest.approx(200, rel=1e-3)
    assert figures["output_tok_per_s"] == pytest.approx(0.6)
    assert figures["total_tok_per_s"] == pytest.approx(20.6)
    assert figures["cached_share"] == pytest.approx(0.25)
    assert [(turn.turn, turn.cached_share) for turn in run.turns] == [(0, 0.5), (1, 0.0)]
    assert run.hits == [(0.125, 0.25)]


def test_a_failed_request_is_an_error_and_no_latency() -> None:
    run = run_of([sample(), sample(times_s=(), error=Kind.STALLED)])
    assert run.figures["requests"] == 2
    assert run.figures["error_rate"] == 0.5
    assert run.errors == {"stalled": 1}
    assert run.error_examples == {"stalled": "why it failed"}
    assert run.figures["ttft_max_ms"] < 200


def test_an_interrupted_request_is_neither() -> None:
    cut = sample()
    cut.interrupted = True
    cut.finished = False
    run = run_of([sample(), cut])
    assert run.figures["requests"] == 1
    assert run.errors == {}


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), 2),
        (Slo(ttft_ms=150), 1),
        (Slo(tpot_ms=19), 0),
        (Slo(tpot_ms=21, ttft_ms=500), 2),
        (Slo(itl_max_ms=10), 0),
        (Slo(e2e_ms=150), 1),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(slo: Slo, kept: int) -> None:
    late = sample(times_s=(10.3, 10.32, 10.34))
    run = run_of([sample(), late, sample(times_s=(), error=Kind.CUT)], slo=slo)
    assert run.figures["goodput_per_s"] == pytest.approx(kept / 10)
    assert run.figures["goodput_share"] == pytest.approx(kept / 3)


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (Usage(100, 2), "fewer output tokens"),
        (Usage(100, 17), "more output tokens claimed than were allowed"),
        (Usage(100, 3, 101), "more cached tokens"),
    ],
)
def test_usage_that_cannot_be_true_is_found_and_not_used(usage: Usage, said: str) -> None:
    run = run_of([sample(usage=usage)])
    assert any(said in finding for finding in run.findings)
    assert run.figures["output_tokens"] == 3


def test_claimed_tokens_need_bytes() -> None:
    quiet = sample(usage=Usage(100, 16))
    quiet.pieces = ["a"] * 3
    assert quiet.findings() == ["more output tokens claimed than the answer has bytes"]
    quiet.usage = Usage(100, 16, 0, hidden=10)
    assert not quiet.findings()


def test_missing_usage_is_found() -> None:
    silent = sample()
    silent.usage = None
    assert run_of([silent]).findings == {"no usage reported": 1}


def test_repeats_are_pooled() -> None:
    fast, slow = run_of([sample()]), run_of([sample(times_s=(10.5, 10.6))], repeat=1)
    (both,) = pool([fast, slow])
    assert both.figures["requests"] == 2
    assert both.figures["ttft_max_ms"] == pytest.approx(500, rel=2e-3)
    assert both.figures["output_tok_per_s"] == pytest.approx(0.25)
    assert both.histograms["itl"].count == 3

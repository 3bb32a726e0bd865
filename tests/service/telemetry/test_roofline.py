"""Verdicts, and `GET /v1/roofline`."""

import pytest

from engine.scripted import text_script
from engine.stats import StepWork, sum_work
from engine.types import Verdict, judge
from tests.service.calls import ask
from tests.service.conftest import run_server


@pytest.mark.parametrize(
    ("wall", "kernel", "memory", "compute", "verdict"),
    [
        (34, 32, 26, 5, Verdict.BANDWIDTH),
        (271, 268, 3, 140, Verdict.COMPUTE),
        (100, 20, 15, 3, Verdict.HOST),
        (100, 94, 1, 2, Verdict.NEITHER),  # cores that others use: slow kernels, not a slow host
        (100, 100, 50, 50, Verdict.BANDWIDTH),
        (100, 100, 14, 10, Verdict.NEITHER),
        (100, 90, 29, 10, Verdict.NEITHER),
        (100, 90, 30, 10, Verdict.BANDWIDTH),
        (100, 90, 10, 30, Verdict.COMPUTE),
        (100, 90, 0, 0, Verdict.UNKNOWN),
        (100, 0, 9, 9, Verdict.UNKNOWN),
    ],
)
def test_the_verdict_is_what_a_step_waits_for(
    wall: int, kernel: int, memory: int, compute: int, verdict: Verdict
) -> None:
    assert judge(wall, kernel, memory, compute) is verdict


def test_sums_keep_rates() -> None:
    one = StepWork("decode", 1, 2, 100, 80, 40, 10, 600, 300)
    two = sum_work([one, one])
    assert two == StepWork("decode", 2, 4, 200, 160, 80, 20, 1200, 600)
    assert (two.mbu, two.mfu, two.host_share, two.intensity) == (0.4, 0.1, 0.2, 2.0)
    assert (StepWork("decode").mbu, StepWork("decode").intensity) == (0.0, 0.0)


def test_an_engine_without_kernels_has_no_roof() -> None:
    with run_server(text_script("abc")) as server:
        ask(server)
        told = server.http.get("/v1/roofline").raise_for_status().json()
    assert told["machine"]["peak_bytes_per_s"] is None
    assert told["phases"] == told["recent"] == []

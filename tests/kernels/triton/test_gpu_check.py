"""The script for a GPU runs, in the interpreter, on a few small cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.triton.checks.sampling import sample_faults

ROOT = Path(__file__).parents[3]


def gpu_check(*arguments: str, interpret: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels.triton.gpu_check", *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_runs_through() -> None:
    done = gpu_check("--reduced", interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("0 faults")
    for part in ("grid", "small_ops", "speed", "models", "sanitizer"):
        assert f"] {part}: " in done.stdout
    for row in ("decode", "torch SDPA", "torch FlexAttention", "prefill", "cascade"):
        assert row in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu_check(interpret="0")
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    done = gpu_check("--reduced", interpret="0")
    assert done.returncode == 2 and "--reduced goes with" in done.stderr


def test_its_account_of_sampling_is_the_kernels() -> None:
    assert sample_faults(torch.device("cpu"), 6, 90) == 0

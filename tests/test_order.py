"""Tests run in random order; a failing one can be repeated."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("verbosity", ["-q", "-qq", "-v"])
def test_the_seed_of_the_order_is_told(verbosity: str) -> None:
    command = [sys.executable, "-m", "pytest", verbosity, "--collect-only", "tests/test_order.py"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert len(re.findall(r"--randomly-seed=\d+", told)) == 1

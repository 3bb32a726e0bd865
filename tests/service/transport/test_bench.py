"""The bench of the edge's cost, for a moment."""

import re
import subprocess
import sys


def test_a_short_run_says_what_it_could_measure() -> None:
    """Less than a tick of CPU was divided by."""
    asked = ["--streams", "2", "--steps", "12", "--rounds", "1", "--only", "chat SSE"]
    command = [sys.executable, "-m", "service.transport.bench", *asked, "--step-ms", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^chat SSE +\d+\.\d ", done.stdout, re.MULTILINE)


def test_too_short_a_run_is_told_so() -> None:
    asked = ["--streams", "1", "--steps", "1", "--rounds", "1", "--only", "chat SSE"]
    command = [sys.executable, "-m", "service.transport.bench", *asked]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ask for more --steps" in done.stderr
    assert "Traceback" not in done.stderr

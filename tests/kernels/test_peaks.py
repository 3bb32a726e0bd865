"""Peaks are measured where a backend can be, kept at their best, and never trusted when broken."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import peaks
from kernels.peaks import Peaks, machine_peaks


class Machine:
    """A backend that takes as long as it is told."""

    numeric_mode = "test"
    threads = 2

    def __init__(self) -> None:
        self.reads = 0

    def read_memory(self, data: NDArray[np.uint8]) -> int:
        self.reads += 1
        return int(data[0])

    def multiply(self, integer: bool, rounds: int) -> int:
        return rounds


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "READ_BYTES", 1 << 12)


def test_a_backend_that_cannot_be_measured_has_none(tmp_path: Path) -> None:
    assert machine_peaks(object(), tmp_path) is None


def test_the_best_ever_measured_is_kept(tmp_path: Path) -> None:
    machine = Machine()
    first = machine_peaks(machine, tmp_path / "new")
    assert first is not None and machine.reads == peaks.RUNS
    path = tmp_path / "new" / "peaks.json"
    (key,) = json.loads(path.read_text())
    path.write_text(json.dumps({key: {"bytes_per_s": 1e30, "flops_per_s": 1e-3}, "other": 1}))
    again = machine_peaks(machine, tmp_path / "new")
    assert again is not None and machine.reads == peaks.RUNS + 1
    assert again.bytes_per_s == 1e30 and again.flops_per_s > 1
    assert json.loads(path.read_text())["other"] == 1


@pytest.mark.parametrize("kept", ["", "[]", "{", '{"x": 3}'])
def test_a_broken_file_is_measured_over(kept: str, tmp_path: Path) -> None:
    (tmp_path / "peaks.json").write_text(kept)
    assert isinstance(machine_peaks(Machine(), tmp_path), Peaks)


def test_broken_figures_are_measured_over(tmp_path: Path) -> None:
    machine_peaks(Machine(), tmp_path)
    path = tmp_path / "peaks.json"
    (key,) = json.loads(path.read_text())
    for broken in (3, {}, {"bytes_per_s": "x", "flops_per_s": 1}, {"bytes_per_s": -1}):
        path.write_text(json.dumps({key: broken}))
        found = machine_peaks(Machine(), tmp_path)
        assert found is not None and found.bytes_per_s > 0


def test_a_place_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert isinstance(machine_peaks(Machine(), tmp_path / "file"), Peaks)

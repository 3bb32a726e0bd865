"""How far the CPU backend's arithmetic is from the float32 reference, on 3,200 positions."""

import numpy as np
import pytest

from tests.golden.conftest import Comparison, TeacherForced


def rows_of(teacher_forced: TeacherForced, mode: str) -> Comparison:
    if teacher_forced.unavailable:
        pytest.skip(teacher_forced.unavailable)
    comparison = teacher_forced.cpu[mode]
    assert len(comparison.kl) == len(teacher_forced.best) >= 2500
    return comparison


@pytest.mark.timeout(600)
def test_exact_mode(teacher_forced: TeacherForced) -> None:
    assert np.mean(rows_of(teacher_forced, "exact").kl) <= 5e-6


@pytest.mark.timeout(600)
def test_default_mode(teacher_forced: TeacherForced) -> None:
    comparison = rows_of(teacher_forced, "default")
    assert np.mean(comparison.kl) <= 0.004
    assert np.mean(np.array(comparison.best) == teacher_forced.best) >= 0.965

"""The reference backend chooses the oracle's tokens, wherever the oracle was sure."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.golden.conftest import Case, TeacherForced

SURE = 1e-3


def test_vectors_are_complete(cases: Sequence[Case]) -> None:
    assert len(cases) == 50
    assert all(len(case.tokens) == len(case.gaps) == 64 for case in cases)
    lengths = [len(case.prompt) for case in cases]
    assert min(lengths) < 40 and max(lengths) > 400


@pytest.mark.timeout(600)
def test_tokens_equal_those_of_transformers(teacher_forced: TeacherForced) -> None:
    different = teacher_forced.best != teacher_forced.golden
    assert not np.any(different & (teacher_forced.gaps >= SURE))

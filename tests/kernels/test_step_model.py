"""The step-time model finds what it is made of, and never a negative coefficient."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.roofline import BatchShape
from kernels.step_model import StepTimeModel

SHAPES = [
    *(
        BatchShape(((1, context),) * batch, batch)
        for batch in (1, 2, 4, 12, 24)
        for context in (512, 1500)
    ),
    *(BatchShape(((new, past + new),), 1) for new in (32, 96, 192, 384, 640) for past in (0, 1024)),
]


@given(st.lists(st.floats(0.1, 5.0), min_size=6, max_size=6))
@settings(max_examples=20)
def test_a_machine_of_the_models_own_kind_is_found(sizes: list[float]) -> None:
    truth = StepTimeModel(tuple(np.array(sizes) * (1e-3, 5e-5, 1e-4, 1e-7, 1e-9, 1e-4)))
    fitted = StepTimeModel.fit(SHAPES, [truth.predict(shape) for shape in SHAPES])
    assert min(fitted.coefficients) >= 0
    for shape in (BatchShape(((1, 512),) * 8, 8), BatchShape(((256, 256),), 1)):
        assert fitted.predict(shape) == pytest.approx(truth.predict(shape), rel=0.02)


def test_noise_makes_no_coefficient_negative() -> None:
    rng = np.random.default_rng(0)
    times = rng.uniform(0.001, 0.3, len(SHAPES)).tolist()
    assert min(StepTimeModel.fit(SHAPES, times).coefficients) >= 0

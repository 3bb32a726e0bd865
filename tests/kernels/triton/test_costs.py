"""What the table of speeds divides by, against counts by hand."""

from dataclasses import replace

import pytest
import torch

from kernels.contract import KVDType
from kernels.triton.checks.grid import AttentionCase
from kernels.triton.checks.operands import build
from kernels.triton.checks.speed import attention_costs

CPU = torch.device("cpu")
CASE = AttentionCase(("decode", 0), 8, 16, 128, (torch.bfloat16, KVDType.BF16), 0.0, 0)
KEYS = 64 + 100
QUERY_AND_OUTPUT = 2 * (2 * 64 * 128 * 2)


@pytest.mark.parametrize(
    ("stored", "slot_bytes"),
    [(KVDType.BF16, 128 * 2), (KVDType.E4M3, 128 + 4), (KVDType.I8, 128 + 4)],
)
def test_decode(stored: KVDType, slot_bytes: int) -> None:
    """Two tokens of 64 heads over 8 kv heads: each key and value once, codes with their scales."""
    case = replace(CASE, format=(torch.bfloat16, stored))
    lens = [(1, 64), (1, 100)]
    num_bytes, flops = attention_costs(build(case, lens, 0, CPU, num_kv_heads=8), lens)
    assert num_bytes == KEYS * 8 * 2 * slot_bytes + QUERY_AND_OUTPUT
    assert flops == KEYS * 64 * (2 * 128 + 2 * 128)


def test_prefill() -> None:
    """A chunk of 3 at the end of 10 sees 8, 9 and 10 keys."""
    case = replace(CASE, kind=("mixed", 0), group=4)
    lens = [(3, 10)]
    num_bytes, flops = attention_costs(build(case, lens, 0, CPU), lens)
    assert flops == (8 + 9 + 10) * 8 * 4 * 128
    assert num_bytes == 10 * 2 * 2 * 128 * 2 + 2 * (3 * 8 * 128 * 2)

"""The fused small ops against the reference, under the interpreter."""

import pytest
import torch

from kernels.contract import ContractError, KVDType
from kernels.triton.checks.small_ops import ELEMENTWISE, check_rope_write
from kernels.triton.copy_pages import copy_pages
from kernels.triton.gather_rows import gather_rows
from kernels.triton.rms_norm import rms_norm
from kernels.triton.silu_mul import silu_mul

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise(name: str, dtype: torch.dtype) -> None:
    outcome = ELEMENTWISE[name](dtype, CPU)
    assert outcome.good, outcome


@pytest.mark.parametrize(
    ("dtype", "stored", "head_dim", "half", "norms", "page_size"),
    [
        (torch.bfloat16, KVDType.BF16, 64, 32, True, 16),
        (torch.float16, KVDType.F16, 80, 40, False, 32),
        (torch.float32, KVDType.F32, 96, 48, True, 64),
        (torch.bfloat16, KVDType.I8, 128, 64, True, 16),
        (torch.bfloat16, KVDType.E4M3, 256, 128, False, 32),
        (torch.float16, KVDType.E5M2, 64, 32, True, 64),
        (torch.float32, KVDType.I8, 80, 16, True, 16),
        (torch.float32, KVDType.E4M3, 64, 3, False, 16),
        (torch.float32, KVDType.BF16, 96, 1, True, 16),
    ],
    ids=str,
)
def test_rope_write(
    dtype: torch.dtype, stored: KVDType, head_dim: int, half: int, norms: bool, page_size: int
) -> None:
    outcome = check_rope_write(
        dtype,
        CPU,
        stored=stored,
        head_dim=head_dim,
        half=half,
        norms=norms,
        page_size=page_size,
    )
    assert outcome.good, outcome


@pytest.mark.usefixtures("device_asserts")
def test_rows_and_pages_are_bounds_checked_when_debugging() -> None:
    table, out = torch.zeros(4, 8), torch.empty(1, 8)
    with pytest.raises(Exception, match="ids: a row is outside the table"):
        gather_rows(table, torch.tensor([4], dtype=torch.int32), out, debug=True)
    with pytest.raises(Exception, match="pairs: a destination is outside the pool"):
        copy_pages(table, torch.tensor([[0, 4]], dtype=torch.int32), debug=True)


def test_arguments_outside_the_contract_are_named() -> None:
    x, weight, out = torch.zeros(2, 8), torch.ones(8), torch.empty(2, 8)
    with pytest.raises(ContractError, match="weight: shape"):
        rms_norm(x, None, weight[:4].contiguous(), out, 1e-5)
    with pytest.raises(ContractError, match="branch: dtype bfloat16"):
        rms_norm(x, x.bfloat16(), weight, out, 1e-5)
    with pytest.raises(ContractError, match="gate_up: shape"):
        silu_mul(x, out)
    with pytest.raises(ContractError, match="ids: dtype int64"):
        gather_rows(x, torch.tensor([0]), out)
    with pytest.raises(ContractError, match="pool: strides"):
        copy_pages(torch.zeros(4, 8)[:, ::2], torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ContractError, match="pool: a page of 3 bytes"):
        copy_pages(torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32))

"""The gate of the MLP: silu(gate) · up."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import COMPUTE, check

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Grid (rows, column tiles)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [T, n] = silu(gate_up[:, :n]) · gate_up[:, n:]. Raises ContractError naming an
    argument."""
    check("out", out, (-1, -1), *COMPUTE)
    num_rows, size = out.shape
    check("gate_up", gate_up, (num_rows, 2 * size), out.dtype)
    if size % 2:
        raise ContractError(f"out: {size} columns, which must be even")
    if num_rows == 0:
        return
    grid = (num_rows, triton.cdiv(size, _BLOCK))
    silu_mul_kernel[grid](gate_up, out, size, BLOCK=_BLOCK, num_warps=4)

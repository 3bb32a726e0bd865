"""Rows of the embedding by token id."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import COMPUTE, check

_BLOCK = 1024


@triton.jit
def gather_rows_kernel(
    table: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (ids, column tiles)."""
    row = tl.load(ids + tl.program_id(0))
    tl.device_assert((row >= 0) & (row < num_rows), "ids: a row is outside the table")
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(table + row.to(tl.int64) * size + column, mask=inside, other=0.0)
    at = tl.program_id(0).to(tl.int64) * size + column
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


def gather_rows(table: Tensor, ids: Tensor, out: Tensor, *, debug: bool = False) -> None:
    """out[i] = table[ids[i]], float32 [T, hidden] from [rows, hidden]; ids int32 [T] lie within the
    table (checked on the device with `debug`). Raises ContractError naming an argument."""
    check("table", table, (-1, -1), *COMPUTE)
    check("ids", ids, (-1,), torch.int32)
    check("out", out, (ids.shape[0], table.shape[1]), torch.float32)
    if ids.shape[0] == 0:
        return
    grid = (ids.shape[0], triton.cdiv(table.shape[1], _BLOCK))
    gather_rows_kernel[grid](
        table, ids, out, table.shape[1], table.shape[0], BLOCK=_BLOCK, num_warps=4, debug=debug
    )

"""Residual sum and RMS normalisation in one pass (Zhang and Sennrich, arXiv:1910.07467)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import COMPUTE, check


@triton.jit
def rms_norm_kernel(
    residual: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
) -> None:
    """Grid (rows). The residual is float32 and changed in place."""
    column = tl.arange(0, PAD)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(residual + at, mask=inside, other=0.0)
    if HAS_BRANCH:
        x += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + at, x, mask=inside)
    mean = tl.sum(x * x, 0) / SIZE
    scaled = x * (1.0 / tl.sqrt(mean + eps)) * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor, out: Tensor, eps: float
) -> None:
    """residual += branch, then out = residual / sqrt(mean(residual²) + eps) · weight.

    residual float32 [T, hidden], weight float32 [hidden], branch (None: nothing is added) and out
    [T, hidden] in the activations' dtype. Raises ContractError naming an argument.
    """
    check("residual", residual, (-1, -1), torch.float32)
    check("weight", weight, (residual.shape[1],), torch.float32)
    check("out", out, tuple(residual.shape), *COMPUTE)
    if branch is not None:
        check("branch", branch, tuple(residual.shape), out.dtype)
    num_rows, size = residual.shape
    if num_rows == 0:
        return
    padded = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        residual,
        residual if branch is None else branch,
        weight,
        out,
        eps,
        SIZE=size,
        PAD=padded,
        HAS_BRANCH=branch is not None,
        num_warps=4 if padded <= 4096 else 8,
    )

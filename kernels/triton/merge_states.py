"""Partial attention over disjoint keys, combined by log-sum-exp in the order of the states."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import COMPUTE, check
from kernels.triton.operands import Heads, States

_HEADS_PER_PROGRAM = 8


@triton.jit
def merge_states_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    D: tl.constexpr,
    PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Grid (items, head tiles). items: int32 [N, 3] of token, its first state, and how many."""
    item = items + tl.program_id(0) * 3
    token, first_state, num_states = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PAD)
    real = head < num_heads
    inside = real[:, None] & (dim < D)[None, :]
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PAD], tl.float32)
    for index in range(num_states):
        at = (first_state + index).to(tl.int64) * num_heads + head
        lse = tl.load(partial_lse + at, mask=real, other=float("-inf"))
        part = tl.load(partial_out + at[:, None] * D + dim[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, weight = tl.exp2(peak - shift), tl.exp2(lse - shift)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = token.to(tl.int64) * num_heads + head
    tl.store(out + at[:, None] * D + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


def merge_states(states: States, items: Tensor, out: Tensor, heads: Heads) -> None:
    """Write the rows of `out` [T, num_heads, head_dim] that `items` (int32 [N, 3]) name; every
    token has at least one state that saw a key. Raises ContractError naming an argument."""
    states.check(heads)
    check("items", items, (-1, 3), torch.int32)
    check("out", out, (-1, heads.num_heads, heads.head_dim), *COMPUTE)
    if items.shape[0] == 0:
        return
    grid = (items.shape[0], -(-heads.num_heads // _HEADS_PER_PROGRAM))
    merge_states_kernel[grid](
        states.out,
        states.lse,
        items,
        out,
        heads.num_heads,
        D=heads.head_dim,
        PAD=heads.padded_dim,
        HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
    )

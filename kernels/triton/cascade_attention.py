"""Attention of a group's new tokens over the pages that all its sequences begin with.

Shared keys are read once per tile of rows, which come from all sequences of the group, and leave a
partial state for each token; the tails are attended to apart and everything is merged by
log-sum-exp (Hydragen, arXiv:2402.05099; FlashInfer's cascade, arXiv:2501.01005). Every new token
sees all shared keys, so nothing is masked but a last, shorter tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import check
from kernels.triton.attend import attend, finish, load_rows
from kernels.triton.operands import AttentionLaunch
from kernels.triton.tuning import Tile


@triton.jit
def cascade_attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    items: tl.tensor,
    members: tl.tensor,
    first_states: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    page_stride: tl.tensor,
    scale_stride: tl.tensor,
    table_stride: tl.tensor,
    num_pages: tl.tensor,
    score_scale: tl.tensor,
    softcap: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAD: tl.constexpr,
    PAGE: tl.constexpr,
    KV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid (items, kv heads). items: int32 [N, 6] of first member, members, a sequence that has the
    pages, first key, end of keys, and which of each token's states to fill."""
    item = items + tl.program_id(0) * 6
    first_member, num_members, sequence = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end, split = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    kv_head, num_heads = tl.program_id(1), tl.num_programs(1) * GROUP
    row = tl.arange(0, BLOCK_M)
    real = row < num_members * GROUP
    token = tl.load(members + first_member + row // GROUP, mask=real, other=0)
    head = kv_head * GROUP + row % GROUP
    rows = load_rows(q, (token.to(tl.int64) * num_heads + head) * D, real, D, PAD, UPCAST)
    last = tl.load(positions + token, mask=real, other=0)
    first = tl.zeros([BLOCK_M], tl.int32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PAD], tl.float32)
    k_head, v_head = keys + kv_head * (PAGE * D), values + kv_head * (PAGE * D)
    k_units, v_units = key_scales + kv_head * PAGE, value_scales + kv_head * PAGE
    table = page_table + sequence.to(tl.int64) * table_stride
    edge = begin
    if q.dtype.element_ty != tl.float32:  # which has no registers for two loops
        edge = begin + (end - begin) // BLOCK_N * BLOCK_N
        peak, total, acc = attend(
            rows, peak, total, acc, first, last, k_head, v_head, k_units, v_units, table,
            page_stride, scale_stride, begin, edge, num_pages, score_scale, softcap, D, PAD, PAGE,
            BLOCK_N, KV, SOFTCAP, False,
        )  # fmt: skip
    peak, total, acc = attend(
        rows, peak, total, acc, first, last, k_head, v_head, k_units, v_units, table, page_stride,
        scale_stride, edge, end, num_pages, score_scale, softcap, D, PAD, PAGE, BLOCK_N, KV,
        SOFTCAP, True,
    )  # fmt: skip
    out, lse = finish(peak, total, acc)
    dim = tl.arange(0, PAD)
    state = tl.load(first_states + token, mask=real, other=0) + split
    at = state.to(tl.int64) * num_heads + head
    inside = real[:, None] & (dim < D)[None, :]
    tl.store(partial_out + at[:, None] * D + dim[None, :], out, mask=inside)
    tl.store(partial_lse + at, lse, mask=real)


def cascade_attention(
    launch: AttentionLaunch, tile: Tile, items: Tensor, members: Tensor, first_states: Tensor
) -> None:
    """Fill the states that `items` (int32 [N, 6]) name.

    members is int32 [M], tokens of the groups one after another; first_states int32 [T]; an item
    has at most tile.rows // heads.group members. Raises ContractError naming an argument before
    the launch, also for heads with a window.
    """
    check("items", items, (-1, 6), torch.int32)
    check("members", members, (-1,), torch.int32)
    check("first_states", first_states, (launch.q.shape[0],), torch.int32)
    if launch.heads.window:
        raise ContractError("window: a shared prefix is not seen whole through a window")
    own = {"members": members, "first_states": first_states}
    launch.run(cascade_attention_kernel, tile, items, **own)

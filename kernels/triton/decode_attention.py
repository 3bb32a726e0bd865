"""Attention of single new tokens, split over the context (flash-decoding).

One program reads one stretch of a sequence's keys of one kv head, once, for all query heads that
share it, and leaves a partial state; `merge_states` combines them. How a sequence is split depends
on its length alone (`plan.SplitRule`), so its result does not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import check
from kernels.triton.attend import attend, finish, load_rows
from kernels.triton.operands import AttentionLaunch
from kernels.triton.tuning import Tile


@triton.jit
def decode_attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    items: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    page_stride: tl.tensor,
    scale_stride: tl.tensor,
    table_stride: tl.tensor,
    num_pages: tl.tensor,
    window: tl.tensor,
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
    """Grid (items, kv heads). items: int32 [N, 5] of token, sequence, first key, end of keys, and
    the state to fill."""
    item = items + tl.program_id(0) * 5
    token, sequence = tl.load(item), tl.load(item + 1)
    begin, end, state = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    kv_head, num_heads = tl.program_id(1), tl.num_programs(1) * GROUP
    row = tl.arange(0, BLOCK_M)
    real = row < GROUP
    head = kv_head * GROUP + row
    rows = load_rows(q, (token.to(tl.int64) * num_heads + head) * D, real, D, PAD, UPCAST)
    last = tl.load(positions + token) + tl.zeros([BLOCK_M], tl.int32)
    first = tl.where(window > 0, last - window + 1, 0)
    peak, total, acc = attend(
        rows,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, PAD], tl.float32),
        first,
        last,
        keys + kv_head * (PAGE * D),
        values + kv_head * (PAGE * D),
        key_scales + kv_head * PAGE,
        value_scales + kv_head * PAGE,
        page_table + sequence.to(tl.int64) * table_stride,
        page_stride,
        scale_stride,
        begin,
        end,
        num_pages,
        score_scale,
        softcap,
        D,
        PAD,
        PAGE,
        BLOCK_N,
        KV,
        SOFTCAP,
        True,
    )
    out, lse = finish(peak, total, acc)
    dim = tl.arange(0, PAD)
    at = state.to(tl.int64) * num_heads + head
    tl.store(
        partial_out + at[:, None] * D + dim[None, :],
        out,
        mask=real[:, None] & (dim < D)[None, :],
    )
    tl.store(partial_lse + at, lse, mask=real)


def decode_attention(launch: AttentionLaunch, tile: Tile, items: Tensor) -> None:
    """Fill the states that `items` (int32 [N, 5]) name.

    Raises ContractError naming an argument before the launch.
    """
    check("items", items, (-1, 5), torch.int32)
    launch.run(decode_attention_kernel, tile, items, window=launch.heads.window)

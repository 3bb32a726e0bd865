"""Causal attention of chunks of new tokens over their pages, ragged, chunks and decodes mixed.

One program takes a tile of rows, new tokens times the query heads of one kv head, and walks over a
range of keys, the cached ones and the chunk's own alike. Where a chunk has all its keys in one
range the output is written directly; else each range leaves a partial state for `merge_states`.
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
def prefill_attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    items: tl.tensor,
    first_states: tl.tensor,
    out: tl.tensor,
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
    """Grid (items, kv heads). items: int32 [N, 6] of first token, tokens, sequence, first key, end
    of keys, and which of each token's states to fill, or -1 for the output itself."""
    item = items + tl.program_id(0) * 6
    first_token, num_tokens, sequence = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end, split = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    kv_head, num_heads = tl.program_id(1), tl.num_programs(1) * GROUP
    row = tl.arange(0, BLOCK_M)
    real = row < num_tokens * GROUP
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    rows = load_rows(q, (token.to(tl.int64) * num_heads + head) * D, real, D, PAD, UPCAST)
    last = tl.load(positions + token, mask=real, other=0)
    first = tl.where(window > 0, last - window + 1, 0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PAD], tl.float32)
    k_head, v_head = keys + kv_head * (PAGE * D), values + kv_head * (PAGE * D)
    k_units, v_units = key_scales + kv_head * PAGE, value_scales + kv_head * PAGE
    table = page_table + sequence.to(tl.int64) * table_stride
    edge = begin
    # Whole tiles of keys that every row sees need no mask. float32 has no registers for two loops.
    if q.dtype.element_ty != tl.float32:
        seen_by_all = tl.minimum(end, tl.load(positions + first_token) + 1)
        num_plain = tl.where(window > 0, 0, tl.maximum(seen_by_all - begin, 0) // BLOCK_N)
        edge = begin + num_plain * BLOCK_N
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
    result, lse = finish(peak, total, acc)
    dim = tl.arange(0, PAD)
    inside = real[:, None] & (dim < D)[None, :]
    if split < 0:
        at = token.to(tl.int64) * num_heads + head
        tl.store(out + at[:, None] * D + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        state = tl.load(first_states + token, mask=real, other=0) + split
        at = state.to(tl.int64) * num_heads + head
        tl.store(partial_out + at[:, None] * D + dim[None, :], result, mask=inside)
        tl.store(partial_lse + at, lse, mask=real)


def prefill_attention(
    launch: AttentionLaunch, tile: Tile, items: Tensor, first_states: Tensor, out: Tensor
) -> None:
    """Fill the rows of `out` [T, num_heads, head_dim], or the states, that `items` (int32 [N, 6])
    name.

    first_states is int32 [T], the first state of each token; an item has at most
    tile.rows // heads.group tokens. Raises ContractError naming an argument before the launch.
    """
    q = launch.q
    check("items", items, (-1, 6), torch.int32)
    check("first_states", first_states, (q.shape[0],), torch.int32)
    check("out", out, tuple(q.shape), q.dtype)
    own = {"first_states": first_states, "out": out, "window": launch.heads.window}
    launch.run(prefill_attention_kernel, tile, items, **own)

"""From the q, k, v projection to rotated queries and written pages, in one pass.

q and k are normalised per head where the model asks for it, then rotated by position (RoFormer,
arXiv:2104.09864, in halves); k and v go into their slots, quantised where the pages hold codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import COMPUTE, check
from kernels.triton.codes import narrow
from kernels.triton.operands import Heads
from kernels.triton.pool import LayerPages


@triton.jit
def _load_part(
    x: tl.tensor, at: tl.tensor, real: tl.tensor, SIZE: tl.constexpr, PAD: tl.constexpr
) -> tl.tensor:
    """float32 [heads, PAD] of SIZE elements from offsets [heads] on."""
    dim = tl.arange(0, PAD)
    inside = real[:, None] & (dim < SIZE)[None, :]
    return tl.load(x + at[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_part(
    x: tl.tensor,
    at: tl.tensor,
    real: tl.tensor,
    part: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Store [heads, PAD] as `_load_part` loads it."""
    dim = tl.arange(0, PAD)
    inside = real[:, None] & (dim < SIZE)[None, :]
    tl.store(x + at[:, None] + dim[None, :], part.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _norm_weight(weight: tl.tensor, SIZE: tl.constexpr, PAD: tl.constexpr) -> tl.tensor:
    dim = tl.arange(0, PAD)
    return tl.load(weight + dim, mask=dim < SIZE, other=0.0)[None, :]


@triton.jit
def _store_slots(
    pages: tl.tensor,
    scales: tl.tensor,
    at: tl.tensor,
    scale_at: tl.tensor,
    real: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    rest: tl.tensor,
    largest: tl.tensor,
    KV: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
) -> None:
    """Store a head's vector in its slot, with its scale where pages hold codes."""
    if KV == "i8" or KV == "e4m3" or KV == "e5m2":
        peak = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        if REST > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(rest), 1))
        scale = peak / largest
        scale = tl.where(scale > 0.0, scale, 1.0)
        tl.store(scales + scale_at, scale, mask=real)
        low = narrow(_within(low, scale, largest), KV)
        high = narrow(_within(high, scale, largest), KV)
        if REST > 0:
            rest = narrow(_within(rest, scale, largest), KV)
    _store_part(pages, at, real, low, HALF, HALF_PAD)
    _store_part(pages, at + HALF, real, high, HALF, HALF_PAD)
    if REST > 0:
        _store_part(pages, at + 2 * HALF, real, rest, REST, REST_PAD)


@triton.jit
def _within(x: tl.tensor, scale: tl.tensor, largest: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(x / scale[:, None], -largest), largest)


@triton.jit
def rope_write_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    slots: tl.tensor,
    q_out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    page_stride: tl.tensor,
    scale_stride: tl.tensor,
    num_pages: tl.tensor,
    eps: tl.tensor,
    largest: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    KV: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Grid (tokens, head tiles of q, then of k, then of v). cos, sin: float32 [T, HALF]."""
    REST: tl.constexpr = D - 2 * HALF
    Q_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token, tile = tl.program_id(0), tl.program_id(1)
    is_q, is_v = tile < Q_TILES, tile >= Q_TILES + KV_TILES
    within = tl.where(is_q, tile, tl.where(is_v, tile - Q_TILES - KV_TILES, tile - Q_TILES))
    head = within * HEADS + tl.arange(0, HEADS)
    real = head < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
    before = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * D
    at = token.to(tl.int64) * width + (before + head) * D
    low = _load_part(qkv, at, real, HALF, HALF_PAD)
    high = _load_part(qkv, at + HALF, real, HALF, HALF_PAD)
    rest = low
    if REST > 0:
        rest = _load_part(qkv, at + 2 * HALF, real, REST, REST_PAD)
    if not is_v:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
        inverse = (1.0 / tl.sqrt(square / D + eps))[:, None]
        if Q_NORM and is_q:
            low *= inverse * _norm_weight(q_norm, HALF, HALF_PAD)
            high *= inverse * _norm_weight(q_norm + HALF, HALF, HALF_PAD)
            if REST > 0:
                rest *= inverse * _norm_weight(q_norm + 2 * HALF, REST, REST_PAD)
        if K_NORM and not is_q:
            low *= inverse * _norm_weight(k_norm, HALF, HALF_PAD)
            high *= inverse * _norm_weight(k_norm + HALF, HALF, HALF_PAD)
            if REST > 0:
                rest *= inverse * _norm_weight(k_norm + 2 * HALF, REST, REST_PAD)
        c = _norm_weight(cos + token.to(tl.int64) * HALF, HALF, HALF_PAD)
        s = _norm_weight(sin + token.to(tl.int64) * HALF, HALF, HALF_PAD)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if is_q:
        to = (token.to(tl.int64) * NUM_HEADS + head) * D
        _store_part(q_out, to, real, low, HALF, HALF_PAD)
        _store_part(q_out, to + HALF, real, high, HALF, HALF_PAD)
        if REST > 0:
            _store_part(q_out, to + 2 * HALF, real, rest, REST, REST_PAD)
    else:
        slot = tl.load(slots + token) + tl.zeros([HEADS], tl.int32)
        tl.device_assert(slot < num_pages * PAGE, "slots: a slot is outside the pool")
        real = real & (slot >= 0)
        page = (slot // PAGE).to(tl.int64)
        to = page * page_stride + (head * PAGE + slot % PAGE) * D
        scale_to = page * scale_stride + head * PAGE + slot % PAGE
        if is_v:
            _store_slots(
                values, value_scales, to, scale_to, real, low, high, rest, largest, KV, HALF,
                HALF_PAD, REST, REST_PAD,
            )  # fmt: skip
        else:
            _store_slots(
                keys, key_scales, to, scale_to, real, low, high, rest, largest, KV, HALF,
                HALF_PAD, REST, REST_PAD,
            )  # fmt: skip


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    slots: Tensor,
    q_out: Tensor,
    pages: LayerPages,
    heads: Heads,
    eps: float,
    *,
    debug: bool = False,
) -> None:
    """Fill q_out [T, num_heads, head_dim] and the slots of the new tokens.

    qkv: [T, (num_heads + 2 num_kv_heads) · head_dim], q, k and v one after another. cos, sin:
    float32 [T, half]; element i turns with i + half, those from 2 half on stay. q_norm, k_norm:
    float32 [head_dim] or None. slots: int32 [T], -1 for no write. Raises ContractError naming an
    argument.
    """
    num_tokens = qkv.shape[0]
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    check("qkv", qkv, (num_tokens, width), *COMPUTE)
    half = cos.shape[-1]
    check("cos", cos, (num_tokens, half), torch.float32)
    check("sin", sin, (num_tokens, half), torch.float32)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check(name, norm, (heads.head_dim,), torch.float32)
    check("slots", slots, (num_tokens,), torch.int32)
    check("q_out", q_out, (num_tokens, heads.num_heads, heads.head_dim), qkv.dtype)
    if not 1 <= half <= heads.head_dim // 2:
        raise ContractError(f"cos: {half} angles for a head of {heads.head_dim}")
    if (pages.num_kv_heads, pages.head_dim) != (heads.num_kv_heads, heads.head_dim):
        raise ContractError("pages: their heads are not those of qkv")
    if num_tokens == 0:
        return
    half_pad = triton.next_power_of_2(half)
    tile = heads_per_program(half_pad)
    tiles = triton.cdiv(heads.num_heads, tile) + 2 * triton.cdiv(heads.num_kv_heads, tile)
    rest = heads.head_dim - 2 * half
    rope_write_kernel[(num_tokens, tiles)](
        qkv,
        cos,
        sin,
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        slots,
        q_out,
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        pages.page_stride,
        pages.scale_stride,
        pages.num_pages,
        eps,
        pages.dtype.largest if pages.dtype.scaled else 1.0,
        NUM_HEADS=heads.num_heads,
        NUM_KV_HEADS=heads.num_kv_heads,
        D=heads.head_dim,
        HALF=half,
        HALF_PAD=half_pad,
        REST_PAD=max(1, triton.next_power_of_2(max(rest, 1))),
        PAGE=pages.page_size,
        KV=pages.dtype.value,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        HEADS=tile,
        num_warps=1,
        debug=debug,
    )


def heads_per_program(half_pad: int) -> int:
    """So many that each of a warp's threads loads 8 elements of both halves at once."""
    return max(1, 256 // half_pad)

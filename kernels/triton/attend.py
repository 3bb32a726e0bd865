"""The arithmetic of all attention kernels: rows of queries over a range of keys in pages.

Online softmax (Milakov and Gimelshein, arXiv:1805.02867) over tiles of keys in ascending order, as
in FlashAttention-2 (arXiv:2307.08691). A row's result depends on its own query, its keys and where
the range begins and ends, never on other rows. Exponents are base 2.
"""

import triton
import triton.language as tl

from kernels.triton.codes import code_unit, widen


@triton.jit
def load_rows(
    q: tl.tensor,
    offset: tl.tensor,
    real: tl.tensor,
    D: tl.constexpr,
    PAD: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """Queries [M, PAD] at element offsets [M]; zeros where a row is not real and beyond D."""
    dim = tl.arange(0, PAD)
    x = tl.load(
        q + offset[:, None] + dim[None, :], mask=real[:, None] & (dim < D)[None, :], other=0.0
    )
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def attend(
    q: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    scale_stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_pages: tl.tensor,
    score_scale: tl.tensor,
    softcap: tl.tensor,
    D: tl.constexpr,
    PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on from (peak [M], total [M], acc [M, PAD]) over keys begin..end, and return them.

    keys, values: a kv head's elements of slot 0 of page 0; slots follow one another. table: page
    ids of the sequence. first, last: the keys each row sees, inclusive, only looked at when
    MASKED; without it the range is a whole number of tiles. score_scale is base 2 unless SOFTCAP.
    """
    dim = tl.arange(0, PAD)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = key < end
        page = tl.load(table + key // PAGE, mask=held, other=0)
        tl.device_assert((page >= 0) & (page < num_pages), "page_table: a page is outside the pool")
        slot = page.to(tl.int64) * page_stride + (key % PAGE) * D
        place = slot[:, None] + dim[None, :]
        inside = held[:, None] & (dim < D)[None, :]
        k = widen(tl.load(keys + place, mask=inside, other=0), KV, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * score_scale
        if KV == "i8" or KV == "e4m3" or KV == "e5m2":
            scale_at = page.to(tl.int64) * scale_stride + key % PAGE
            unit = tl.load(key_scales + scale_at, mask=held, other=0.0) * code_unit(KV)
            scores *= unit[None, :]
        if SOFTCAP:
            bent = 2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0
            scores = softcap * 1.4426950408889634 * bent
        if MASKED:
            seen = (
                held[None, :] & (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
            )
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(p, 1)
        peak = new_peak
        v = widen(tl.load(values + place, mask=inside, other=0), KV, q.dtype)
        if KV == "i8" or KV == "e4m3" or KV == "e5m2":
            unit = tl.load(value_scales + scale_at, mask=held, other=0.0) * code_unit(KV)
            p *= unit[None, :]
        acc = tl.dot(p.to(q.dtype), v, acc * decay[:, None], input_precision="tf32x3")
    return peak, total, acc


@triton.jit
def finish(peak: tl.tensor, total: tl.tensor, acc: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The attention output [M, PAD] and its log-sum-exp [M], base 2; 0 and -inf for rows that saw
    no key."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    return acc / total[:, None], tl.where(empty, float("-inf"), peak + tl.log2(total))

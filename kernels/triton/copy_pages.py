"""Copies of pages, many pairs in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import check

_BLOCK = 4096


@triton.jit
def copy_pages_kernel(
    pool: tl.tensor,
    pairs: tl.tensor,
    num_words: tl.tensor,
    num_pages: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (pairs, tiles of a page). pool: int32 words; a page is `num_words` of them."""
    pair = pairs + tl.program_id(0) * 2
    src, dst = tl.load(pair), tl.load(pair + 1)
    tl.device_assert((src >= 0) & (src < num_pages), "pairs: a source is outside the pool")
    tl.device_assert((dst >= 0) & (dst < num_pages), "pairs: a destination is outside the pool")
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    data = tl.load(pool + src.to(tl.int64) * num_words + word, mask=inside, other=0)
    tl.store(pool + dst.to(tl.int64) * num_words + word, data, mask=inside)


def copy_pages(pool: Tensor, pairs: Tensor, *, debug: bool = False) -> None:
    """pool[dst] = pool[src] for each row (src, dst) of `pairs`, int32 [N, 2].

    pool: [num_pages, ...] of any dtype, a page being a whole number of int32 words. No page is a
    destination twice, or both source and destination. Raises ContractError naming an argument.
    """
    check("pairs", pairs, (-1, 2), torch.int32)
    check("pool", pool, tuple(pool.shape), pool.dtype)
    page_bytes = pool[0].nbytes if len(pool) else 4
    if page_bytes % 4:
        raise ContractError(f"pool: a page of {page_bytes} bytes is no whole number of words")
    if pairs.shape[0] == 0:
        return
    num_words = page_bytes // 4
    words = pool.view(len(pool), -1).view(torch.int32)
    grid = (pairs.shape[0], triton.cdiv(num_words, _BLOCK))
    copy_pages_kernel[grid](
        words, pairs, num_words, len(pool), BLOCK=_BLOCK, num_warps=8, debug=debug
    )

"""A pool of pages and a batch for a case: random contents, pages in random order, NaN in every
slot that no sequence has."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.contract import ForwardBatch, KVLayout, PrefixGroup
from kernels.reference import quantise
from kernels.triton.arguments import STORAGE
from kernels.triton.checks.grid import AttentionCase
from kernels.triton.operands import Heads
from kernels.triton.pool import TritonKVPool

Lengths = list[tuple[int, int]]
"""Per sequence how many tokens are new, and how many keys there are with them."""


@dataclass(frozen=True, slots=True)
class Operands:
    """`keys` and `values` are what the pool holds, float32 [num_kv_heads, keys, head_dim] for each
    sequence, on the CPU."""

    heads: Heads
    batch: ForwardBatch
    pool: TritonKVPool
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def lengths(case: AttentionCase) -> tuple[Lengths, int]:
    """The lengths of a case's sequences, and how many pages they all share."""
    page, border = case.page_size, 64 + case.edge
    kind, _ = case.kind
    if kind == "decode":
        return [(1, border), (1, 1), (1, page + 1)], 0
    if kind == "mixed":
        return [(5, border), (1, page + 2), (page + 1, page + 1)], 0
    shared = 64 // page
    return [(1, border + 33), (1, 66), (4, 70)], shared


def build(
    case: AttentionCase,
    lens: Lengths,
    shared_pages: int,
    device: torch.device,
    *,
    num_kv_heads: int = 2,
    seed: int = 0,
) -> Operands:
    """Random operands; the first `shared_pages` pages are the same for all sequences."""
    rng = np.random.default_rng(seed)
    dtype, stored = case.format
    heads = Heads(
        case.group * num_kv_heads, num_kv_heads, case.head_dim, case.kind[1], case.softcap
    )
    layout = KVLayout(1, num_kv_heads, case.head_dim, case.page_size, stored)
    batch, used = _batch(case, lens, shared_pages, rng)
    generator = torch.Generator().manual_seed(seed)
    num_pages = int(batch.page_table.max()) + 3
    shape = (num_pages, 1, 2, num_kv_heads, case.page_size, case.head_dim)
    x = torch.randn(shape, generator=generator)
    empty = torch.ones(num_pages * case.page_size, dtype=torch.bool)
    empty[used] = False
    empty = empty.view(num_pages, 1, 1, 1, case.page_size)
    scales: Tensor | None = None
    if stored.scaled:
        codes, scales = quantise(x, stored)
        held = codes.float() * scales[..., None]
        scales = scales.masked_fill(empty, torch.nan)
        pages = codes.view(STORAGE[stored])
    else:
        pages = x.masked_fill(empty[..., None], torch.nan).to(STORAGE[stored])
        held = pages.float()
    keys, values = _held(held, batch, case.page_size)
    pool = TritonKVPool(layout, pages.to(device), None if scales is None else scales.to(device))
    num_tokens = batch.token_ids.size
    q = torch.randn((num_tokens, heads.num_heads, case.head_dim), generator=generator)
    return Operands(heads, batch, pool, q.to(dtype).to(device), keys, values)


def _batch(
    case: AttentionCase, lens: Lengths, shared_pages: int, rng: np.random.Generator
) -> tuple[ForwardBatch, Tensor]:
    """The batch, and the slots that sequences have."""
    size = case.page_size
    counts = [-(-total // size) for _, total in lens]
    own = sum(count - shared_pages for count in counts)
    order = rng.permutation(own + shared_pages + 2).astype(np.int32)
    shared, rest = order[:shared_pages], order[shared_pages:]
    table = np.full((len(lens), max(counts)), -1, dtype=np.int32)
    positions, slots, used = [], [], []
    for row, (count, (new, total)) in enumerate(zip(counts, lens, strict=True)):
        table[row, :count] = np.concatenate([shared, rest[: count - shared_pages]])
        rest = rest[count - shared_pages :]
        place = np.arange(total)
        slot = table[row, place // size] * size + place % size
        used.append(slot)
        positions.append(place[total - new :])
        slots.append(slot[total - new :])
    new_tokens = [new for new, _ in lens]
    num_tokens = sum(new_tokens)
    group = (PrefixGroup(tuple(range(len(lens))), shared_pages),) if shared_pages else ()
    batch = ForwardBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        cu_seqlens_q=np.cumsum([0, *new_tokens]).astype(np.int32),
        seq_lens=np.array([total for _, total in lens], dtype=np.int32),
        page_table=table,
        slot_mapping=np.concatenate(slots).astype(np.int32),
        logit_rows=np.arange(num_tokens, dtype=np.int32),
        groups=group,
    )
    return batch, torch.from_numpy(np.concatenate(used).astype(np.int64))


def _held(held: Tensor, batch: ForwardBatch, page_size: int) -> tuple[list[Tensor], list[Tensor]]:
    keys, values = [], []
    for row, total in enumerate(batch.seq_lens.tolist()):
        ids = torch.from_numpy(batch.page_table[row, : -(-total // page_size)].astype(np.int64))
        both = held[ids, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :total]
        keys.append(both[0])
        values.append(both[1])
    return keys, values

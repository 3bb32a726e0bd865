"""Planning: chunks of sequences become the flat arrays of one step."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from operator import sub

import msgspec
import numpy as np
from numpy.typing import NDArray

from kernels.contract import ForwardBatch, Int32Array, PrefixGroup


class SequenceChunk(msgspec.Struct, frozen=True):
    """Tokens [start, end) of one sequence.

    token_ids: int32 [at least end], the sequence from its beginning.
    pages:     its page table, for at least `end` tokens.
    num_valid: slots below it hold K and V already and are not written again.
    logits:    positions in the chunk, one after another, whose logits are wanted.
    sequence:  what is the same object in all chunks of a sequence, as long as of its pages only
               the last one changes, when it becomes full; None for a chunk that none follows.
    """

    token_ids: Int32Array
    start: int
    end: int
    num_valid: int
    pages: Sequence[int] | NDArray[np.int64]
    logits: range
    sequence: object = None


def plan_batch(chunks: Sequence[SequenceChunk], page_size: int, num_top: int) -> ForwardBatch:
    """The batch of all chunks in order, and so are the rows of logits. A page table row ends with
    the page of its last token: pages beyond are not shown."""
    ends = [chunk.end for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    num_pages = [-(-end // page_size) for end in ends]
    page_table = np.full((len(chunks), max(num_pages)), -1, dtype=np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, num_pages, strict=True)):
        page_table[row, :count] = chunk.pages[:count]
    sums = [0, *accumulate(map(sub, ends, starts))]
    rows = _logit_rows(chunks, sums)
    if sums[-1] == len(chunks):
        tokens, slots = lone_tokens(chunks, page_size)
        parts = _arrays(tokens, starts, slots, sums, ends, rows)
        token_ids, positions, slot_mapping, cu_seqlens_q, seq_lens, logit_rows = parts
    else:
        cu_seqlens_q, seq_lens, logit_rows = _arrays(sums, ends, rows)
        token_ids, positions, slot_mapping = _tokens(chunks, page_table, cu_seqlens_q, page_size)
    full_pages = [start // page_size for start in starts]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        page_table=page_table,
        slot_mapping=slot_mapping,
        logit_rows=logit_rows,
        num_top=num_top,
        groups=prefix_groups(page_table, full_pages) if len(chunks) > 1 else (),
    )


def _arrays(*parts: list[int]) -> list[Int32Array]:
    """Each as int32, all of them made at once: short arrays cost by their number."""
    numbers = np.array([*chain.from_iterable(parts)], dtype=np.int32)
    ends = [0, *accumulate(map(len, parts))]
    return [numbers[start:end] for start, end in pairwise(ends)]


def lone_tokens(chunks: Sequence[SequenceChunk], page_size: int) -> tuple[list[int], list[int]]:
    """Token and slot of chunks of one token each: as `_tokens`, without arrays for so little."""
    tokens = [chunk.token_ids.item(chunk.start) for chunk in chunks]
    slots = [
        -1
        if chunk.start < chunk.num_valid
        else int(chunk.pages[chunk.start // page_size]) * page_size + chunk.start % page_size
        for chunk in chunks
    ]
    return tokens, slots


def _tokens(
    chunks: Sequence[SequenceChunk], page_table: Int32Array, first: Int32Array, page_size: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Token, position and slot of each new token; `first` is `cu_seqlens_q`."""
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    valid = np.array([chunk.num_valid for chunk in chunks], dtype=np.int32)
    sequence = np.repeat(np.arange(len(chunks), dtype=np.int32), np.diff(first))
    positions = np.arange(first[-1], dtype=np.int32) + (starts - first[:-1])[sequence]
    slots = page_table[sequence, positions // page_size] * page_size + positions % page_size
    slots[positions < valid[sequence]] = -1
    token_ids = np.concatenate([chunk.token_ids[chunk.start : chunk.end] for chunk in chunks])
    return token_ids, positions, slots


def _logit_rows(chunks: Sequence[SequenceChunk], sums: Sequence[int]) -> list[int]:
    """Where in the batch the positions stand whose logits are wanted."""
    rows: list[int] = []
    for chunk, first in zip(chunks, sums, strict=False):
        offset = first - chunk.start
        rows += range(chunk.logits.start + offset, chunk.logits.stop + offset)
    return rows


def prefix_groups(page_table: Int32Array, num_full_pages: Sequence[int]) -> tuple[PrefixGroup, ...]:
    """Disjoint groups of sequences that begin with the same pages, chosen so that as few pages as
    possible are read again: all that share a first page, or smaller groups that share more.

    page_table: int32 [S, max_pages]; num_full_pages [S]: the pages that lie wholly before
    the new tokens of each sequence: only those count, every new token sees all of them.
    """
    _, groups = _best_groups(page_table, num_full_pages, list(range(len(page_table))), 0)
    return tuple(groups)


def _best_groups(
    page_table: Int32Array, num_full_pages: Sequence[int], members: list[int], num_shared: int
) -> tuple[int, list[PrefixGroup]]:
    """Page reads spared and the groups, of members whose first `num_shared` pages are the same."""
    apart: dict[int, list[int]] = {}
    for sequence in members:
        if num_full_pages[sequence] > num_shared:
            apart.setdefault(int(page_table[sequence, num_shared]), []).append(sequence)
    spared, groups = 0, list[PrefixGroup]()
    for some in apart.values():
        if len(some) > 1:
            shown = page_table[some, num_shared : min(num_full_pages[i] for i in some)]
            same = (shown == shown[0]).all(axis=0)
            length = num_shared + (same.size if same.all() else int(same.argmin()))
            inner = _best_groups(page_table, num_full_pages, some, length)
            spared += inner[0]
            groups += inner[1]
    together = (len(members) - 1) * num_shared
    if together >= spared and num_shared:
        return together, [PrefixGroup(tuple(members), num_shared)]
    return spared, groups

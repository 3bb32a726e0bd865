"""Planning: chunks of sequences become the flat arrays of one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.contract import ForwardBatch, Int32Array, PrefixGroup


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Tokens [start, end) of one sequence.

    token_ids: int32 [at least end], the sequence from its beginning.
    pages:     its page table, for at least `end` tokens.
    num_valid: slots below it hold K and V already and are not written again.
    logits:    positions in the chunk, one after another, whose logits are wanted.
    """

    token_ids: Int32Array
    start: int
    end: int
    num_valid: int
    pages: Sequence[int] | NDArray[np.int64]
    logits: range


def plan_batch(chunks: Sequence[SequenceChunk], page_size: int, num_top: int) -> ForwardBatch:
    """The batch of all chunks in order, and so are the rows of logits. A page table row ends with
    the page of its last token: pages beyond are not shown."""
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    ends = np.array([chunk.end for chunk in chunks], dtype=np.int32)
    valid = np.array([chunk.num_valid for chunk in chunks], dtype=np.int32)
    lengths = ends - starts
    cu_seqlens_q = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    token_ids = np.concatenate([chunk.token_ids[chunk.start : chunk.end] for chunk in chunks])
    num_pages = -(-ends // page_size)
    page_table = np.full((len(chunks), int(num_pages.max())), -1, dtype=np.int32)
    for row, chunk in enumerate(chunks):
        count = num_pages[row]
        page_table[row, :count] = chunk.pages[:count]
    sequence = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    within = np.arange(token_ids.size, dtype=np.int32) - cu_seqlens_q[sequence]
    positions = within + starts[sequence]
    slots = page_table[sequence, positions // page_size] * page_size + positions % page_size
    slots[positions < valid[sequence]] = -1
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=ends,
        page_table=page_table,
        slot_mapping=slots,
        logit_rows=_logit_rows(chunks, cu_seqlens_q),
        num_top=num_top,
        groups=prefix_groups(page_table, starts // page_size) if len(chunks) > 1 else (),
    )


def _logit_rows(chunks: Sequence[SequenceChunk], cu_seqlens_q: Int32Array) -> Int32Array:
    """int32 [R]: where in the batch the positions stand whose logits are wanted."""
    rows: list[int] = []
    for chunk, first in zip(chunks, cu_seqlens_q.tolist(), strict=False):
        offset = first - chunk.start
        rows += range(chunk.logits.start + offset, chunk.logits.stop + offset)
    return np.array(rows, dtype=np.int32)


def prefix_groups(page_table: Int32Array, num_full_pages: Int32Array) -> tuple[PrefixGroup, ...]:
    """Sequences that begin with the same pages, and how many they all share.

    page_table: int32 [S, max_pages]; num_full_pages: int32 [S], the pages that lie wholly before
    the new tokens of each sequence: only those count, every new token sees all of them.
    """
    first: dict[int, list[int]] = {}
    for sequence, page in enumerate(page_table[:, 0].tolist()):
        if num_full_pages[sequence]:
            first.setdefault(page, []).append(sequence)
    groups = []
    for members in first.values():
        if len(members) > 1:
            shown = page_table[members, : num_full_pages[members].min()]
            same = (shown == shown[0]).all(axis=0)
            num_pages = same.size if same.all() else int(same.argmin())
            groups.append(PrefixGroup(tuple(members), num_pages))
    return tuple(groups)

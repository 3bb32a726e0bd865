"""Batches from step to step: most go on where the last one ended, each sequence by a token."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.execution.forward_batch import SequenceChunk, lone_tokens, plan_batch, prefix_groups
from kernels.contract import ForwardBatch, Int32Array


class BatchPlanner:
    """Makes what `plan_batch` makes; from an earlier batch, where its sequences go on by a token.
    That is the last one, or the one before, if the last one was for a step that did not come."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._made: deque[tuple[Sequence[SequenceChunk], ForwardBatch]] = deque(maxlen=2)

    def plan(self, chunks: Sequence[SequenceChunk], num_top: int) -> ForwardBatch:
        """The batch of the next step; those of before stay as they are."""
        batch = None
        for before, last in reversed(self._made):
            if len(chunks) == len(before) and all(map(_follows, chunks, before)):
                batch = self._go_on(last, chunks, num_top)
                break
        if batch is None:
            batch = plan_batch(chunks, self._page_size, num_top)
        self._made.append((chunks, batch))
        return batch

    def _go_on(
        self, last: ForwardBatch, chunks: Sequence[SequenceChunk], num_top: int
    ) -> ForwardBatch | None:
        """None where the page table is too narrow."""
        page_size = self._page_size
        token_ids, slots = lone_tokens(chunks, page_size)
        table, groups = last.page_table, last.groups
        moved = [
            row
            for row, (slot, before) in enumerate(
                zip(slots, last.slot_mapping.tolist(), strict=True)
            )
            if slot != before + 1 or slot % page_size < 2
        ]
        if moved:
            if max(chunks[row].start for row in moved) // page_size >= table.shape[1]:
                return None
            table = _with_pages(table, chunks, moved, page_size)
            if len(chunks) > 1:
                groups = prefix_groups(table, [chunk.start // page_size for chunk in chunks])
        return ForwardBatch(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=last.positions + 1,
            cu_seqlens_q=last.cu_seqlens_q,
            seq_lens=last.seq_lens + 1,
            page_table=table,
            slot_mapping=np.array(slots, dtype=np.int32),
            logit_rows=last.logit_rows,
            num_top=num_top,
            groups=groups,
        )


def _follows(chunk: SequenceChunk, before: SequenceChunk) -> bool:
    """Whether it is the next token of the same sequence, for its logits as the one before."""
    return (
        chunk.sequence is not None
        and chunk.sequence is before.sequence
        and before.start + 1 == before.end == chunk.start == chunk.end - 1
        and len(before.logits) == len(chunk.logits) == 1
        and before.num_valid <= before.start
        and chunk.num_valid <= chunk.start
    )


def _with_pages(
    table: Int32Array, chunks: Sequence[SequenceChunk], rows: Sequence[int], page_size: int
) -> Int32Array:
    """A copy with the present pages of these rows. A row's pages change when its last one is full:
    another one begins, and that may be found in the cache under another id; if this batch was made
    ahead, only after it."""
    table = table.copy()
    for row in rows:
        chunk = chunks[row]
        count = -(-chunk.end // page_size)
        table[row, :count] = chunk.pages[:count]
    return table

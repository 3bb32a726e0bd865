"""Steps a backend over whole sequences, for tests of models and backends."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.contract import Backend, DecoderSpec, Float32Array, ForwardBatch, KVDType, KVLayout


def kv_layout(spec: DecoderSpec, page_size: int = 16, dtype: KVDType = KVDType.F32) -> KVLayout:
    return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, page_size, dtype)


def make_batch(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    page_size: int,
    *,
    logit_rows: Sequence[int] | None = None,
    num_top: int = 0,
) -> ForwardBatch:
    """A batch of (new token ids, position of the first, page ids) per sequence; all rows' logits
    unless said otherwise."""
    tokens, positions, slots, counts, lens = [], [], [], [0], []
    for ids, start, pages in parts:
        place = np.arange(start, start + len(ids))
        tokens += list(ids)
        positions += place.tolist()
        slots += (np.asarray(pages)[place // page_size] * page_size + place % page_size).tolist()
        counts.append(counts[-1] + len(ids))
        lens.append(start + len(ids))
    table = np.full((len(parts), max(len(pages) for _, _, pages in parts)), -1, dtype=np.int32)
    for row, (_, _, pages) in zip(table, parts, strict=True):
        row[: len(pages)] = pages
    rows = range(len(tokens)) if logit_rows is None else logit_rows
    return ForwardBatch(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        cu_seqlens_q=np.array(counts, dtype=np.int32),
        seq_lens=np.array(lens, dtype=np.int32),
        page_table=table,
        slot_mapping=np.array(slots, dtype=np.int32),
        logit_rows=np.array(rows, dtype=np.int32),
        num_top=num_top,
    )


def all_logits(
    backend: Backend[Any, Any],
    model: Any,
    token_ids: Sequence[int],
    *,
    chunks: Sequence[int] = (),
    page_size: int = 16,
    dtype: KVDType = KVDType.F32,
) -> Float32Array:
    """Logits [T, vocab] of one sequence, computed `chunks` tokens at a time, then the rest.

    Its pages lie in the pool in falling order, with unused ones between.
    """
    num_pages = -(-len(token_ids) // page_size)
    kv = backend.alloc_kv(kv_layout(model.spec, page_size, dtype), 2 * num_pages)
    pages = range(2 * num_pages - 1, -1, -2)
    rows, start = [], 0
    for length in (*chunks, len(token_ids) - sum(chunks)):
        part = token_ids[start : start + length]
        if len(part):
            full = backend.step(model, kv, make_batch([(part, start, pages)], page_size)).full
            assert full is not None
            rows.append(full)
        start += length
    return np.concatenate(rows)

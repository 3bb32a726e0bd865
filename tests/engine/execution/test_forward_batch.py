"""Chunks of sequences as flat arrays."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine.execution.forward_batch import SequenceChunk, plan_batch, prefix_groups
from kernels.contract import KVLayout, PrefixGroup, check_batch
from tests.engine.tiny import PAGE, SPEC, VOCAB

LAYOUT = KVLayout(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, PAGE)


def chunk(
    start: int, end: int, pages: Sequence[int], *, num_valid: int | None = None, logits: bool = True
) -> SequenceChunk:
    tokens = (np.arange(end + 5, dtype=np.int32) + start) % VOCAB
    return SequenceChunk(
        tokens,
        start,
        end,
        start if num_valid is None else num_valid,
        pages,
        range(end - 1, end) if logits else range(0),
    )


def test_a_mixed_batch() -> None:
    batch = plan_batch(
        [
            chunk(20, 21, [7, 3, 9]),
            chunk(0, 18, [5, 6], logits=False),
            chunk(31, 32, [1, 2], num_valid=32),
        ],
        PAGE,
        num_top=4,
    )
    check_batch(batch, SPEC, LAYOUT, num_pages=10)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 19, 20]
    assert batch.seq_lens.tolist() == [21, 18, 32]
    assert batch.positions.tolist() == [20, *range(18), 31]
    assert batch.token_ids.tolist() == [40, *range(18), 62]
    assert batch.page_table.tolist() == [[7, 3], [5, 6], [1, 2]]
    assert batch.slot_mapping.tolist() == [
        3 * PAGE + 4,
        *(5 * PAGE + i for i in range(16)),
        6 * PAGE,
        6 * PAGE + 1,
        -1,
    ]
    assert batch.logit_rows.tolist() == [0, 19]
    assert batch.num_top == 4


def test_lone_tokens_are_planned_as_beside_a_longer_chunk() -> None:
    lone = [
        chunk(40, 41, [1, 2, 3]),
        chunk(32, 33, [4, 5, 6], num_valid=33),
        chunk(15, 16, [7], logits=False),
    ]
    alone = plan_batch(lone, PAGE, 0)
    beside = plan_batch([*lone, chunk(0, 9, [8])], PAGE, 0)
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "cu_seqlens_q"):
        few, many = getattr(alone, name), getattr(beside, name)
        assert few.tolist() == many[: few.size].tolist()
        assert few.dtype == many.dtype == np.int32
    assert alone.slot_mapping.tolist() == [3 * PAGE + 8, -1, 7 * PAGE + 15]


@pytest.mark.parametrize("end", [15, 16, 17, 31, 32, 33])
def test_page_boundaries(end: int) -> None:
    batch = plan_batch([chunk(end - 1, end, [4, 5, 6])], PAGE, 0)
    check_batch(batch, SPEC, LAYOUT, num_pages=10)
    assert batch.page_table.shape == (1, -(-end // PAGE))
    page, slot = divmod(end - 1, PAGE)
    assert batch.slot_mapping.tolist() == [(4 + page) * PAGE + slot]
    assert batch.groups == ()


def test_rows_of_different_length_are_padded() -> None:
    batch = plan_batch([chunk(40, 41, [1, 2, 3]), chunk(3, 4, [4])], PAGE, 0)
    assert batch.page_table.tolist() == [[1, 2, 3], [4, -1, -1]]


def test_groups_share_leading_whole_pages() -> None:
    batch = plan_batch(
        [
            chunk(40, 41, [1, 2, 3]),
            chunk(40, 48, [1, 2, 4]),
            chunk(20, 21, [8, 9]),
            chunk(50, 51, [1, 2, 3, 5]),
            chunk(16, 17, [8, 7]),
            chunk(0, 3, [6]),
        ],
        PAGE,
        0,
    )
    assert batch.groups == (PrefixGroup((0, 1, 3), 2), PrefixGroup((2, 4), 1))


def test_a_group_ends_where_its_shortest_member_begins() -> None:
    """Every new token of every member must see all of the group's keys."""
    table = np.array([[1, 2, 3], [1, 2, 3]], dtype=np.int32)
    assert prefix_groups(table, [2, 1]) == (PrefixGroup((0, 1), 1),)
    assert prefix_groups(table, [2, 0]) == ()


def test_groups_that_share_more_are_preferred_to_one_that_shares_little() -> None:
    """Three share five pages and two others six; together they would share one."""
    rows = [[0, 1, 2, 3, 4, 10 + i] for i in range(3)] + [[0, 5, 6, 7, 8, 9]] * 2
    table = np.array([*rows, [0, 20, 21, 22, 23, 24]], dtype=np.int32)
    full = [6] * 6
    assert prefix_groups(table, full) == (PrefixGroup((0, 1, 2), 5), PrefixGroup((3, 4), 6))
    assert prefix_groups(table[:, :2].copy(), [1] * 6) == (PrefixGroup((0, 1, 2, 3, 4, 5), 1),)

"""Attention kernels against the reference, under the interpreter."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.contract import ContractError, KVDType
from kernels.triton.attention import Tiles, upload
from kernels.triton.checks.attention import BOUNDS, SMALL_SPLITS, case_error, error, expected, run
from kernels.triton.checks.grid import (
    FORMATS,
    HEAD_DIMS,
    KINDS,
    AttentionCase,
    full_grid,
    pairwise_cases,
)
from kernels.triton.checks.operands import Operands, build
from kernels.triton.decode_attention import decode_attention
from kernels.triton.operands import AttentionLaunch, Heads, States
from kernels.triton.plan import SplitRule, plan_attention
from kernels.triton.tuning import Tile

CPU = torch.device("cpu")
TILES = Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2))
CASE = AttentionCase(("decode", 0), 3, 16, 64, FORMATS[2], 0.0, 0)


@pytest.mark.parametrize("case", pairwise_cases(), ids=lambda case: case.name)
def test_pairwise(case: AttentionCase) -> None:
    assert case_error(case, CPU, 90) < BOUNDS[case.format[0]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-window{kind[1]}")
def test_full_grid(kind: tuple[str, int], head_dim: int) -> None:
    wrong = {
        case.name: found
        for case in full_grid()
        if (case.kind, case.head_dim) == (kind, head_dim)
        and not (found := case_error(case, CPU, 90)) < BOUNDS[case.format[0]]
    }
    assert not wrong


def test_the_pairwise_cases_hold_every_pair() -> None:
    cases = pairwise_cases()
    assert 50 <= len(cases) <= 70
    assert {(case.format, case.head_dim) for case in cases} == {
        (format_, dim) for format_ in FORMATS for dim in (64, 80, 96, 128, 256)
    }
    assert {(case.kind, case.page_size) for case in cases} == {
        (kind, size) for kind in {case.kind for case in cases} for size in (16, 32, 64)
    }


def test_every_storage_is_in_the_grid() -> None:
    assert {stored for _, stored in FORMATS} == set(KVDType)


def test_a_sequence_gets_the_same_bits_in_every_batch() -> None:
    """Decodes and chunks of any company, without prefix groups; all sequences have the same pages
    at the same places."""
    lens = [(1, 70), (5, 40), (1, 33), (20, 52)]
    together = build(CASE, lens, 0, CPU)
    out = run(together, TILES, SMALL_SPLITS, cascade=False)
    for sequence in range(len(lens)):
        begin, end = together.batch.cu_seqlens_q[sequence : sequence + 2].tolist()
        alone = _alone(together, sequence)
        assert torch.equal(run(alone, TILES, SMALL_SPLITS, cascade=False), out[begin:end])


def test_a_shared_prefix_changes_nothing_but_rounding() -> None:
    operands = build(replace(CASE, kind=("cascade", 0)), [(1, 40), (3, 50), (1, 33)], 2, CPU)
    with_groups = run(operands, TILES, SMALL_SPLITS)
    without = run(operands, TILES, SMALL_SPLITS, cascade=False)
    assert error(with_groups, expected(operands)) < 1e-5
    assert error(without, expected(operands)) < 1e-5
    assert not torch.equal(with_groups, without)


def test_an_error_in_the_kernel_would_show() -> None:
    """The check itself can fail: another key, or another scale, is far beyond the bound."""
    operands = build(CASE, [(1, 40)], 0, CPU)
    operands.keys[0][:, 7] += 1.0
    assert error(run(operands, TILES, SMALL_SPLITS), expected(operands)) > 1e-3


@pytest.mark.usefixtures("device_asserts")
def test_pages_are_bounds_checked_when_debugging() -> None:
    operands = build(CASE, [(1, 40), (5, 20)], 0, CPU)
    run(operands, TILES, SMALL_SPLITS, debug=True)
    operands.batch.page_table[0, 1] = operands.pool.num_pages
    with pytest.raises(Exception, match="page_table: a page is outside the pool"):
        run(operands, TILES, SMALL_SPLITS, debug=True)


def test_splits_depend_on_the_length_alone() -> None:
    rule = SplitRule()
    assert rule.ranges(0, 512, rule.keys) == [(0, 512)]
    assert rule.ranges(0, 513, rule.keys) == [(0, 512), (512, 513)]
    assert len(rule.ranges(0, 16384, rule.keys)) == 32
    assert len(rule.ranges(0, 131072, rule.keys)) == 32
    assert rule.ranges(5, 40000, rule.keys)[1] == (2053, 4101)


def test_the_plan_reads_every_visible_key_once() -> None:
    """For all tokens of a mixed batch: the ranges that fill its states, or its output, follow one
    another from the first key it sees to its own."""
    lens = [(1, 70), (5, 40), (1, 66), (20, 52)]
    for window, shared in ((0, 0), (0, 2), (24, 0)):
        operands = build(replace(CASE, kind=("cascade", window)), lens, shared, CPU)
        batch = operands.batch
        plan = plan_attention(batch, 16, window, 5, () if window else batch.groups, SMALL_SPLITS)
        counts = {token: (first, count) for token, first, count in plan.merge.tolist()}
        filled: dict[int, list[tuple[int, int, int]]] = {}
        for token, _, low, high, state in plan.decode.tolist():
            filled.setdefault(token, []).append((state - counts[token][0], low, high))
        for first, number, _, low, high, split in plan.prefill.tolist():
            for token in range(first, first + number):
                filled.setdefault(token, []).append((max(split, 0), low, high))
        for first, number, _, low, high, split in plan.cascade.tolist():
            for token in plan.members[first : first + number].tolist():
                filled.setdefault(token, []).append((split, low, high))
        assert sorted(filled) == list(range(batch.token_ids.size))
        for token, parts in filled.items():
            position = int(batch.positions[token])
            parts.sort()
            assert [split for split, _, _ in parts] == list(range(len(parts)))
            assert parts[0][1] <= max(0, position - window + 1 if window else 0)
            assert parts[-1][2] > position
            assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))


def test_arguments_outside_the_contract_are_named_before_a_launch() -> None:
    operands = build(CASE, [(1, 40)], 0, CPU)
    heads, pages = operands.heads, operands.pool.layers[0]
    table, positions, items = upload(
        [
            operands.batch.page_table,
            operands.batch.positions,
            np.array([[0, 0, 0, 40, 0]], dtype=np.int32),
        ],
        CPU,
    )
    states = States.empty(1, heads, CPU)
    states.out.fill_(torch.nan)
    good: dict[str, Any] = {
        "q": operands.q,
        "pages": pages,
        "page_table": table,
        "positions": positions,
        "states": states,
        "heads": heads,
    }
    wide = torch.zeros((1, heads.num_heads, 128))
    wrong: list[tuple[str, object, str]] = [
        ("q", operands.q.double(), "q: dtype float64"),
        ("q", operands.q[:, :3], "q: shape"),
        ("q", wide[:, :, ::2], "q: strides"),
        ("q", torch.zeros(operands.q.numel() + 1)[1:].view(operands.q.shape), "q: its memory"),
        ("page_table", table.long(), "page_table: dtype int64"),
        ("page_table", table[0], "page_table: shape"),
        ("positions", torch.zeros(3, dtype=torch.int32), "positions: shape"),
        ("states", States(states.out[..., :8].contiguous(), states.lse), "states.out: shape"),
        ("heads", Heads(6, 2, 32), "q: shape"),
        ("heads", Heads(6, 3, 64), "pages: 2 heads of 64, not 3"),
    ]
    for name, value, message in wrong:
        with pytest.raises(ContractError, match=message):
            AttentionLaunch(**{**good, name: value})
    launch = AttentionLaunch(**good)
    with pytest.raises(ContractError, match="items: shape"):
        decode_attention(launch, TILES.decode, items[:, :4].contiguous())
    assert bool(states.out.isnan().all())
    decode_attention(launch, TILES.decode, items)
    assert not bool(states.out.isnan().any())


@pytest.mark.parametrize(
    ("heads", "message"),
    [((7, 2, 64), "num_heads"), ((4, 2, 257), "head_dim"), ((4, 2, 64, -1), "window")],
)
def test_heads_outside_the_contract(heads: tuple[int, ...], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Heads(*heads)


def _alone(together: Operands, sequence: int) -> Operands:
    """One sequence of a batch as a batch of its own, over the same pool."""
    batch = together.batch
    begin, end = batch.cu_seqlens_q[sequence : sequence + 2].tolist()
    return replace(
        together,
        batch=replace(
            batch,
            token_ids=batch.token_ids[begin:end].copy(),
            positions=batch.positions[begin:end].copy(),
            cu_seqlens_q=np.array([0, end - begin], dtype=np.int32),
            seq_lens=batch.seq_lens[sequence : sequence + 1].copy(),
            page_table=batch.page_table[sequence : sequence + 1].copy(),
            slot_mapping=batch.slot_mapping[begin:end].copy(),
            logit_rows=np.arange(end - begin, dtype=np.int32),
        ),
        q=together.q[begin:end].clone(),
        keys=together.keys[sequence : sequence + 1],
        values=together.values[sequence : sequence + 1],
    )

"""All attention kernels of a batch against the reference."""

from typing import Final

import torch
from torch import Tensor

from kernels import reference
from kernels.triton.attention import BatchAttention, Tiles, upload
from kernels.triton.checks.grid import AttentionCase
from kernels.triton.checks.operands import Operands, build, lengths
from kernels.triton.plan import SplitRule

BOUNDS: Final = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest error of a row, relative to its length, by the activations' dtype."""

SMALL_SPLITS: Final = SplitRule(keys=32, chunk_keys=48, shared_keys=16)
"""Makes several splits of the short contexts that the interpreter can do."""


def run(
    operands: Operands,
    tiles: Tiles,
    splits: SplitRule,
    *,
    cascade: bool = True,
    debug: bool = False,
) -> Tensor:
    """Outputs of all rows, [T, num_heads, head_dim]; NaN where nothing was written."""
    batch, q = operands.batch, operands.q
    table, positions = upload([batch.page_table, batch.positions], q.device)
    attention = BatchAttention(
        batch,
        table,
        positions,
        operands.pool.layout.page_size,
        operands.heads,
        tiles,
        cascade=cascade,
        debug=debug,
        splits=splits,
    )
    attention.poison()
    out = torch.full_like(q, torch.nan)
    attention.run(q, operands.pool.layers[0], out)
    return out


def expected(operands: Operands) -> Tensor:
    """The same in float32 on the CPU, by the reference, sequence by sequence."""
    heads, rows = operands.heads, []
    for sequence, (keys, values) in enumerate(zip(operands.keys, operands.values, strict=True)):
        begin, end = operands.batch.cu_seqlens_q[sequence : sequence + 2].tolist()
        position = torch.from_numpy(operands.batch.positions[begin:end]).long()[:, None]
        key = torch.arange(keys.shape[1])
        visible = key <= position
        if heads.window:
            visible &= key > position - heads.window
        q = operands.q[begin:end].float().cpu()
        rows.append(reference.attention(q, keys, values, visible, heads.softcap))
    return torch.cat(rows).view(operands.q.shape)


def error(out: Tensor, wanted: Tensor) -> float:
    """The largest error of a row relative to its length; infinite where anything is NaN."""
    got = out.float().cpu()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def case_error(
    case: AttentionCase, device: torch.device, capability: int, *, debug: bool = False
) -> float:
    """The error of one case with the tiles the backend would use."""
    operands = build(case, *lengths(case), device)
    dtype, stored = case.format
    tiles = Tiles.choose(operands.heads, dtype, stored, capability)
    return error(run(operands, tiles, SMALL_SPLITS, debug=debug), expected(operands))

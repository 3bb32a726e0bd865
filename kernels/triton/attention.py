"""Attention of a whole batch, composed of its kernels."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.contract import ForwardBatch, Int32Array, KVDType
from kernels.triton.cascade_attention import cascade_attention
from kernels.triton.decode_attention import decode_attention
from kernels.triton.merge_states import merge_states
from kernels.triton.operands import AttentionLaunch, Heads, States
from kernels.triton.plan import DEFAULT_SPLITS, SplitRule, plan_attention
from kernels.triton.pool import LayerPages
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.tuning import Tile, decode_tile, prefill_tile


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shapes of one kind of attention."""

    decode: Tile
    prefill: Tile

    @classmethod
    def choose(cls, heads: Heads, dtype: torch.dtype, stored: KVDType, capability: int) -> "Tiles":
        shape = (heads.padded_dim, heads.group, dtype.itemsize)
        return cls(decode_tile(*shape), prefill_tile(*shape, stored.scaled, capability))


class BatchAttention:
    """Attention over one batch with one window, planned once and run for each layer.

    `cascade` uses the batch's prefix groups; without it a sequence's result does not depend on the
    batch. States are allocated once and reused by all layers.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        page_table: Tensor,
        positions: Tensor,
        page_size: int,
        heads: Heads,
        tiles: Tiles,
        *,
        cascade: bool,
        debug: bool,
        splits: SplitRule = DEFAULT_SPLITS,
    ) -> None:
        self._heads, self._tiles, self._debug = heads, tiles, debug
        self._page_table, self._positions = page_table, positions
        groups = batch.groups if cascade and not heads.window else ()
        plan = plan_attention(
            batch, page_size, heads.window, tiles.prefill.rows // heads.group, groups, splits
        )
        device = positions.device
        parts = (plan.decode, plan.prefill, plan.cascade, plan.members, plan.first_states)
        self._decode, self._prefill, self._cascade, self._members, self._first, self._merge = (
            upload([*parts, plan.merge], device)
        )
        self._states = States.empty(plan.num_states, heads, device)

    def poison(self) -> None:
        """Fill the states with NaN, so that one that is read before it is written shows."""
        self._states.out.fill_(torch.nan)
        self._states.lse.fill_(torch.nan)

    def run(self, q: Tensor, pages: LayerPages, out: Tensor) -> None:
        """Fill out [T, num_heads, head_dim] from q of the same shape."""
        launch = AttentionLaunch(
            *(q, pages, self._page_table, self._positions, self._states, self._heads), self._debug
        )
        decode_attention(launch, self._tiles.decode, self._decode)
        prefill_attention(launch, self._tiles.prefill, self._prefill, self._first, out)
        if self._cascade.shape[0]:
            cascade_attention(
                launch, self._tiles.prefill, self._cascade, self._members, self._first
            )
        merge_states(self._states, self._merge, out, self._heads)


def upload(arrays: list[Int32Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, by one transfer; each is aligned to 16 bytes."""
    begins = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)])
    packed = np.zeros(int(begins[-1]), dtype=np.int32)
    for begin, array in zip(begins[:-1].tolist(), arrays, strict=True):
        packed[begin : begin + array.size] = array.ravel()
    moved = torch.from_numpy(packed).to(device)
    return [
        moved[begin : begin + array.size].view(array.shape)
        for begin, array in zip(begins[:-1].tolist(), arrays, strict=True)
    ]

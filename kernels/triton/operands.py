"""What attention kernels share besides pages: head shape, partial states, and their launch."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import COMPUTE, check, upcast
from kernels.triton.pool import LayerPages
from kernels.triton.tuning import Tile

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's attention. `window` is how many keys a query sees, 0 for all; `softcap` 0 is
    none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ContractError(f"num_heads: {self.num_heads} is no multiple of num_kv_heads")
        if not 1 <= self.head_dim <= LARGEST_HEAD:
            raise ContractError(f"head_dim: {self.head_dim} is not within 1..{LARGEST_HEAD}")
        if self.window < 0 or self.softcap < 0:
            raise ContractError("window and softcap must not be negative")

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """head_dim as the tiles have it: a power of two of at least 16."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def score_scale(self) -> float:
        """Factor of q·k; into base 2 unless a soft cap comes between."""
        scale = 1 / math.sqrt(self.head_dim)
        return scale if self.softcap else scale * math.log2(math.e)


@dataclass(frozen=True, slots=True)
class States:
    """Partial results: `out` float32 [num_states, num_heads, head_dim], each the attention over
    some keys alone, and `lse` float32 [num_states, num_heads], their log-sum-exp in base 2."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, num_states: int, heads: Heads, device: torch.device) -> "States":
        shape = (num_states, heads.num_heads)
        return cls(
            torch.empty((*shape, heads.head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def check(self, heads: Heads) -> None:
        """Raise ContractError naming `states`."""
        num_states = self.lse.shape[0]
        check("states.lse", self.lse, (num_states, heads.num_heads), torch.float32)
        shape = (num_states, heads.num_heads, heads.head_dim)
        check("states.out", self.out, shape, torch.float32)


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """What every attention kernel is launched with: queries [T, num_heads, head_dim] over pages,
    into partial states. page_table is int32 [S, max_pages], positions int32 [T]; with `debug` a
    page outside the pool stops the kernel.

    Raises ContractError for the first operand outside the contract.
    """

    q: Tensor
    pages: LayerPages
    page_table: Tensor
    positions: Tensor
    states: States
    heads: Heads
    debug: bool = False

    def __post_init__(self) -> None:
        heads, pages = self.heads, self.pages
        check("q", self.q, (-1, heads.num_heads, heads.head_dim), *COMPUTE)
        check("page_table", self.page_table, (-1, -1), torch.int32)
        check("positions", self.positions, (self.q.shape[0],), torch.int32)
        self.states.check(heads)
        if (pages.num_kv_heads, pages.head_dim) != (heads.num_kv_heads, heads.head_dim):
            raise ContractError(
                f"pages: {pages.num_kv_heads} heads of {pages.head_dim}, "
                f"not {heads.num_kv_heads} of {heads.head_dim}"
            )

    def run(self, kernel: Any, tile: Tile, items: Tensor, **own: object) -> None:
        """Launch a program for each of the items and kv heads; `own` is what this kernel takes
        besides. Nothing is launched for no items."""
        if items.shape[0] == 0:
            return
        pages, heads = self.pages, self.heads
        kernel[(items.shape[0], heads.num_kv_heads)](
            q=self.q,
            keys=pages.keys,
            values=pages.values,
            key_scales=pages.key_scales,
            value_scales=pages.value_scales,
            page_table=self.page_table,
            positions=self.positions,
            items=items,
            partial_out=self.states.out,
            partial_lse=self.states.lse,
            page_stride=pages.page_stride,
            scale_stride=pages.scale_stride,
            table_stride=self.page_table.shape[1],
            num_pages=pages.num_pages,
            score_scale=heads.score_scale,
            softcap=heads.softcap,
            GROUP=heads.group,
            D=heads.head_dim,
            PAD=heads.padded_dim,
            PAGE=pages.page_size,
            KV=pages.dtype.value,
            SOFTCAP=heads.softcap != 0.0,
            UPCAST=upcast(self.q.dtype),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            debug=self.debug,
            **own,
        )

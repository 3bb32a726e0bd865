"""What attention kernels share besides pages: head shape, partial states, and their checks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import COMPUTE, check
from kernels.triton.pool import LayerPages

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


def check_attention(
    q: Tensor,
    pages: LayerPages,
    page_table: Tensor,
    positions: Tensor,
    states: States,
    heads: Heads,
) -> None:
    """Raise ContractError for the first operand of an attention kernel outside the contract."""
    check("q", q, (-1, heads.num_heads, heads.head_dim), *COMPUTE)
    check("page_table", page_table, (-1, -1), torch.int32)
    check("positions", positions, (q.shape[0],), torch.int32)
    states.check(heads)
    if (pages.num_kv_heads, pages.head_dim) != (heads.num_kv_heads, heads.head_dim):
        raise ContractError(
            f"pages: {pages.num_kv_heads} heads of {pages.head_dim}, "
            f"not {heads.num_kv_heads} of {heads.head_dim}"
        )

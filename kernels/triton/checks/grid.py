"""Cases of attention: a few that cover every pair of properties, or all of them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kernels.contract import KVDType

FORMATS: Final = (
    (torch.bfloat16, KVDType.BF16),
    (torch.float16, KVDType.F16),
    (torch.float32, KVDType.F32),
    (torch.bfloat16, KVDType.I8),
    (torch.bfloat16, KVDType.E4M3),
    (torch.float16, KVDType.E5M2),
    (torch.float16, KVDType.I8),
    (torch.bfloat16, KVDType.F16),
)
"""dtypes of activations and of pages."""

KINDS: Final = (
    *(("decode", 0), ("decode", 1), ("decode", 37)),
    *(("mixed", 0), ("mixed", 1), ("mixed", 37)),
    ("cascade", 0),
)
"""Lengths (`operands.lengths`) and windows, through which no shared prefix is seen whole."""
GROUPS: Final = (1, 3, 4, 8)
PAGE_SIZES: Final = (16, 32, 64)
HEAD_DIMS: Final = (64, 80, 96, 128, 256)
SOFTCAPS: Final = (0.0, 20.0)
EDGES: Final = (-1, 0, 1)
"""How far from the border of a page and a tile the longest sequence ends."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One launch of a whole batch."""

    kind: tuple[str, int]
    group: int
    page_size: int
    head_dim: int
    format: tuple[torch.dtype, KVDType]
    softcap: float
    edge: int

    @property
    def name(self) -> str:
        dtype, stored = self.format
        kind, window = self.kind
        parts = [kind, f"g{self.group}", f"page{self.page_size}", f"d{self.head_dim}"]
        parts += [str(dtype).removeprefix("torch."), stored.value]
        parts += [f"window{window}"] if window else []
        parts += ["softcap"] if self.softcap else []
        return " ".join([*parts, f"edge{self.edge:+d}"])


def pairwise_cases() -> list[AttentionCase]:
    """Few cases in which every two values of two properties occur together."""
    factors = (KINDS, GROUPS, PAGE_SIZES, HEAD_DIMS, FORMATS, SOFTCAPS, EDGES)
    return [AttentionCase(*values) for values in _pairwise(factors)]


def full_grid() -> Iterator[AttentionCase]:
    """Every kind, group, page size, head size and format; the rest takes turns."""
    rest = itertools.cycle(itertools.product(SOFTCAPS, EDGES))
    for values in itertools.product(KINDS, GROUPS, PAGE_SIZES, HEAD_DIMS, FORMATS):
        yield AttentionCase(*values, *next(rest))


def _pairwise(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Greedy: of some random rows that hold an uncovered pair, take the one that covers most."""
    rng = np.random.default_rng(0)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(factors)), 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    rows = []
    while missing:
        (a, i), (b, j) = min(missing)
        best: tuple[int, ...] = ()
        gain = -1
        for _ in range(50):
            row = [int(rng.integers(len(values))) for values in factors]
            row[a], row[b] = i, j
            covered = len(missing & _pairs(row))
            if covered > gain:
                best, gain = tuple(row), covered
        missing -= _pairs(best)
        rows.append(tuple(values[i] for values, i in zip(factors, best, strict=True)))
    return rows


def _pairs(row: Sequence[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(row), 2))

"""Sampling against a plain account of the same rules, by sorting, in float64."""

import numpy as np
import torch

from kernels.contract import Float32Array
from kernels.triton.sample import sample

_MASK = (1 << 64) - 1
_ROWS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 12, 0.8, 0.05),
)
"""Temperature, top-k, top-p and min-p."""


def sample_faults(device: torch.device, num_rows: int, vocab_size: int) -> int:
    """In how many rows of random logits, with many ties, another token is drawn."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 2, (num_rows, vocab_size)).round(2).astype(np.float32)
    logits[::3, : vocab_size // 4] = -np.inf
    rows = [_ROWS[row % len(_ROWS)] for row in range(num_rows)]
    seeds = rng.integers(0, 1 << 64, num_rows, dtype=np.uint64)
    tokens = torch.full((num_rows,), -7, dtype=torch.int32, device=device)
    sample(
        torch.from_numpy(logits).to(device),
        torch.tensor([[one[0], one[2], one[3]] for one in rows]).double().to(device),
        torch.tensor([one[1] for one in rows], dtype=torch.int32, device=device),
        torch.from_numpy(seeds.view(np.int64)).to(device),
        torch.arange(num_rows, dtype=torch.int32, device=device),
        tokens,
    )
    wanted = [
        _drawn(logits[row], rows[row], _uniform(int(seeds[row]), row)) for row in range(num_rows)
    ]
    return sum(got != want for got, want in zip(tokens.tolist(), wanted, strict=True))


def _drawn(row: Float32Array, params: tuple[float, int, float, float], uniform: float) -> int:
    temperature, top_k, top_p, min_p = params
    if temperature == 0.0:
        return int(row.argmax())
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.argsort(-row, kind="stable")
    if top_k:
        order = order[:top_k]
    if top_p < 1.0:
        falling = weights[order]
        order = order[np.cumsum(falling) - falling < top_p * falling.sum()]
    if not top_k and top_p == 1.0:
        order = np.arange(row.size)
    kept = np.where(weights[order] >= min_p, weights[order], 0.0)
    cumulative = np.cumsum(kept)
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


def _uniform(seed: int, position: int) -> float:
    step = 0x9E3779B97F4A7C15 * (position + 1)
    return (_mix(_mix(seed) + step) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

"""Rotary embeddings: every scaling scheme folded into inverse frequencies and one scale.

Checked against `transformers`' modeling_rope_utils in tests; computed in float64.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rope:
    """`inv_freq` [rotary_dim / 2], radians per position; cos and sin are multiplied by `scale`."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


def plain(theta: float, dim: int) -> Rope:
    """Angle of pair i at position p: p · theta^(-2i/dim) (Su et al. 2021)."""
    return _rope(_inv_freq(theta, dim))


def linear(theta: float, dim: int, factor: float) -> Rope:
    """Position interpolation (Chen et al. 2023): positions are divided by `factor`."""
    return _rope(_inv_freq(theta, dim) / factor)


def divided(theta: float, dim: int, factors: NDArray[np.float32]) -> Rope:
    """Each frequency divided by its own factor, as GGUF's `rope_freqs` tensor gives them."""
    return _rope(_inv_freq(theta, dim) / factors.astype(np.float64))


def llama3(
    theta: float,
    dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> Rope:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, a ramp between them."""
    inv_freq = _inv_freq(theta, dim)
    turns = original_context * inv_freq / (2 * math.pi)
    ramp = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return _rope(inv_freq * ((1 - ramp) / factor + ramp))


def yarn(
    theta: float,
    dim: int,
    *,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    scale: float | None = None,
) -> Rope:
    """YaRN (Peng et al. 2023): pairs that turn more than `beta_fast` times over the original
    context are kept, those below `beta_slow` interpolated, a linear ramp over the pair index
    between; `truncate` rounds the ramp's ends outwards. `scale` None is the paper's
    0.1 ln(factor) + 1.
    """

    def pair_with(turns: float) -> float:
        return dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    inv_freq = _inv_freq(theta, dim)
    inv_freq = inv_freq * (interpolated / factor + (1 - interpolated))
    return _rope(inv_freq, yarn_scale(factor) if scale is None else scale)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of the attention logits' temperature with the context: 0.1 m ln(s) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _inv_freq(theta: float, dim: int) -> Float64Array:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _rope(inv_freq: Float64Array, scale: float = 1.0) -> Rope:
    return Rope(tuple(inv_freq.tolist()), scale)

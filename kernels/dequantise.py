"""Stored weights as float32, in plain numpy: for the reference backend and for tests.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A 4-bit block holds
its first 16 elements in the low halves of its 16 bytes and its last 16 in the high halves.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.contract import Float32Array, Weight, WeightType

_HALF_BLOCK_BYTES = 16


def dequantise(weight: Weight) -> Float32Array:
    """The weight's elements, float32 of `weight.shape`, in memory of their own."""
    match weight.type:
        case WeightType.F32:
            values = weight.data.view("<f4").copy()
        case WeightType.F16:
            values = weight.data.view("<f2").astype(np.float32)
        case WeightType.BF16:
            values = (weight.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case _:
            values = _dequantise_blocks(weight)
    return values.reshape(weight.shape)


def _dequantise_blocks(weight: Weight) -> Float32Array:
    blocks = weight.data.reshape(-1, weight.type.block_bytes)
    scale = _float16_column(blocks, 0)
    match weight.type:
        case WeightType.Q8_0:
            return scale * blocks[:, 2:].view(np.int8)
        case WeightType.Q4_0:
            return scale * (_nibbles(blocks) - np.float32(8))
        case WeightType.Q4_1:
            return scale * _nibbles(blocks) + _float16_column(blocks, 2)
    raise AssertionError(weight.type)


def _float16_column(blocks: NDArray[np.uint8], start: int) -> Float32Array:
    """float32 [num_blocks, 1] of the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8]) -> Float32Array:
    """float32 [num_blocks, 32] of the 4-bit numbers at the end of each block."""
    quants = blocks[:, -_HALF_BLOCK_BYTES:]
    return np.concatenate([quants & 0xF, quants >> 4], axis=1).astype(np.float32)

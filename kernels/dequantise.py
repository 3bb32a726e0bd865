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
    match weight.type:
        case WeightType.Q8_0:
            return _float16_column(blocks, 0) * blocks[:, 2:].view(np.int8)
        case WeightType.Q4_0:
            return _float16_column(blocks, 0) * (_nibbles(blocks) - np.float32(8))
        case WeightType.Q4_1:
            return _float16_column(blocks, 0) * _nibbles(blocks) + _float16_column(blocks, 2)
        case WeightType.Q5_0:
            quants = _nibbles(blocks) + _fifth_bits(blocks, 2)
            return _float16_column(blocks, 0) * (quants - np.float32(16))
        case WeightType.Q5_1:
            quants = _nibbles(blocks) + _fifth_bits(blocks, 4)
            return _float16_column(blocks, 0) * quants + _float16_column(blocks, 2)
        case WeightType.Q4_K | WeightType.Q5_K:
            return _dequantise_scaled_minimum(blocks, weight.type is WeightType.Q5_K)
        case WeightType.Q6_K:
            return _dequantise_q6_k(blocks)
    raise AssertionError(weight.type)


def _dequantise_scaled_minimum(blocks: NDArray[np.uint8], five_bits: bool) -> Float32Array:
    """Q4_K and Q5_K: eight runs of 32 elements, each d · scale · q - dmin · minimum.

    Block: float16 d and dmin; 12 bytes of 6-bit scales and minima; the fifth bits of Q5_K, bit i of
    byte j for element j of run i; four times 32 bytes, whose low and high halves are two runs.
    """
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    pairs = blocks[:, -128:].reshape(-1, 4, 1, 32)
    quants = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
    if five_bits:
        runs = np.arange(8, dtype=np.uint8)[None, :, None]
        quants = quants | ((blocks[:, None, 16:48] >> runs) & 1) << 4
    scale = _float16_column(blocks, 0) * scales
    minimum = _float16_column(blocks, 2) * minima
    values: Float32Array = scale[:, :, None] * quants - minimum[:, :, None]
    return values.reshape(-1, 256)


def _dequantise_q6_k(blocks: NDArray[np.uint8]) -> Float32Array:
    """16 runs of 16 elements, each d · scale · (q - 32).

    Block: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, float16 d. In each half
    of 128 elements, run i of 32 has its nibbles in the low (i < 2) or high halves of the 32 bytes
    at 32 · (i % 2), and its bit pairs at bit 2i of 32 bytes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    pairs = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (nibbles | pairs << 4).astype(np.float32) - np.float32(32)
    scales = _float16_column(blocks, 208) * blocks[:, 192:208].view(np.int8)
    values: Float32Array = scales[:, :, None] * quants.reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _fifth_bits(blocks: NDArray[np.uint8], start: int) -> Float32Array:
    """float32 [num_blocks, 32], 16 where the bit of the four bytes at `start` is set."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits.astype(np.float32) * np.float32(16)


def _float16_column(blocks: NDArray[np.uint8], start: int) -> Float32Array:
    """float32 [num_blocks, 1] of the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8]) -> Float32Array:
    """float32 [num_blocks, 32] of the 4-bit numbers at the end of each block."""
    quants = blocks[:, -_HALF_BLOCK_BYTES:]
    return np.concatenate([quants & 0xF, quants >> 4], axis=1).astype(np.float32)

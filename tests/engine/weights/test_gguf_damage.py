"""Damaged, truncated and hostile GGUF files: always a CheckpointError, never memory or a crash."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.weights.checkpoint_file import CheckpointError
from engine.weights.gguf import open_gguf

HUGE = 2**62 + 1


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, type_id: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value


def tensor(name: str, dims: Sequence[int], type_id: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", dim) for dim in dims)
    return string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", type_id, offset)


def gguf_bytes(
    entries: Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes = bytes(256),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    directory = header + b"".join(entries) + b"".join(tensors)
    return directory + bytes(-len(directory) % 32) + data


NAME = entry("general.architecture", 8, string("llama"))
VOCABULARY = entry("words", 9, struct.pack("<IQ", 8, 2) + string("one") + string("two"))
NUMBERS = entry("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3))
NESTED = entry("nested", 9, struct.pack("<IQIQ2B", 9, 1, 0, 2, 7, 8))
MATRIX = tensor("a.weight", (32, 2), 2, 0)
VECTOR = tensor("b.weight", (8,), 0, 64)
GOOD = gguf_bytes([NAME, VOCABULARY, NUMBERS, NESTED], [MATRIX, VECTOR], bytes(96))


def write(folder: Path, data: bytes) -> Path:
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    return path


def test_the_undamaged_file_opens(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path, GOOD))
    assert file.metadata["words"] == ("one", "two")
    assert file.metadata["nested"] == ((7, 8),)
    assert {name: weight.shape for name, weight in file.tensors.items()} == {
        "a.weight": (2, 32),
        "b.weight": (8,),
    }


def test_truncated_anywhere(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        path = write(tmp_path, GOOD[:length])
        with pytest.raises(CheckpointError, match=r"damaged\.gguf"):
            open_gguf(path)


DEEP = struct.pack("<IQ", 9, 1) * 40 + struct.pack("<IQB", 0, 1, 0)

BAD: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + GOOD[4:], "not a GGUF file: it begins with b'GGML', not b'GGUF'"),
    "web page": (b"<!DOCTYPE html><html lang=en>", "not a GGUF file: it is a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "zip": (b"PK\x03\x04" + bytes(40), "a zip archive or PyTorch checkpoint"),
    "safetensors": (struct.pack("<Q", 99) + b'{"__metadata__":{}}', "name the folder"),
    "version 1": (gguf_bytes([], [], version=1), "version 1 is not supported"),
    "big-endian": (gguf_bytes([], [], version=3 << 24), "big-endian"),
    "tensor count": (gguf_bytes([NAME], [], counts=(HUGE, 1)), f"{HUGE} tensors"),
    "entry count": (gguf_bytes([NAME], [], counts=(0, HUGE)), f"{HUGE} metadata entries"),
    "string length": (
        gguf_bytes([entry("k", 8, struct.pack("<Q", HUGE))], []),
        f"k: truncated or damaged: {HUGE} bytes",
    ),
    "string array count": (
        gguf_bytes([entry("k", 9, struct.pack("<IQ", 8, HUGE))], []),
        f"k: truncated or damaged: {HUGE} strings",
    ),
    "string in array": (
        gguf_bytes([entry("k", 9, struct.pack("<IQQ", 8, 1, HUGE))], []),
        "k: truncated or damaged: a string ends beyond",
    ),
    "number array count": (
        gguf_bytes([entry("k", 9, struct.pack("<IQ", 10, HUGE))], []),
        f"k: truncated or damaged: {HUGE} values",
    ),
    "nested array count": (
        gguf_bytes([entry("k", 9, struct.pack("<IQ", 9, HUGE))], []),
        f"k: truncated or damaged: {HUGE} arrays",
    ),
    "nesting": (gguf_bytes([entry("k", 9, DEEP)], []), "k: arrays are nested too deeply"),
    "value type": (gguf_bytes([entry("k", 99, b"")], []), "k: damaged: unknown value type 99"),
    "utf-8": (gguf_bytes([entry("k", 8, string(b"\xff"))], []), "k: damaged: a string is not UTF"),
    "duplicate key": (gguf_bytes([NAME, NAME], []), "general.architecture: key occurs twice"),
    "duplicate tensor": (gguf_bytes([], [MATRIX, MATRIX]), "a.weight: tensor name occurs twice"),
    "no dimensions": (gguf_bytes([], [tensor("t", (), 0, 0)]), "t: has 0 dimensions"),
    "3 dimensions": (gguf_bytes([], [tensor("t", (1, 1, 1), 0, 0)]), "t: has 3 dimensions"),
    "empty": (gguf_bytes([], [tensor("t", (0,), 0, 0)]), r"t: damaged: shape \(0,\) is empty"),
    "huge": (gguf_bytes([], [tensor("t", (HUGE, HUGE), 0, 0)]), "t: truncated: its data ends"),
    "offset": (gguf_bytes([], [tensor("t", (8,), 0, 2**63)]), "t: truncated: its data ends"),
    "misaligned": (gguf_bytes([], [tensor("t", (8,), 0, 4)]), "t: damaged: offset 4 is not"),
    "partial block": (gguf_bytes([], [tensor("t", (40,), 2, 0)]), "t: damaged: 40 columns"),
    "q2_k": (gguf_bytes([], [tensor("t", (256,), 10, 0)]), "t: Q2_K is not supported; supported"),
    "unknown type": (gguf_bytes([], [tensor("t", (8,), 77, 0)]), "t: type 77 is not supported"),
    "overlap": (
        gguf_bytes([], [tensor("t", (16,), 0, 0), tensor("u", (8,), 0, 32)]),
        "u: damaged: its data overlaps that of t",
    ),
    "alignment": (
        gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 24))], []),
        "general.alignment: 24 is not a power of two",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_named_damage(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    path = write(tmp_path, data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            open_gguf(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@settings(max_examples=400)
@given(
    position=st.integers(0, len(GOOD) - 1),
    patch=st.one_of(
        st.binary(min_size=1, max_size=4),
        st.sampled_from([2**64 - 1, 2**63, 2**32, HUGE]).map(lambda v: struct.pack("<Q", v)),
    ),
)
def test_overwritten_bytes_never_crash(tmp_path: Path, position: int, patch: bytes) -> None:
    data = GOOD[:position] + patch + GOOD[position + len(patch) :]
    try:
        file = open_gguf(write(tmp_path, data))
    except CheckpointError:
        return
    for weight in file.tensors.values():
        assert int(weight.data.sum()) >= 0


def test_unreadable_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match="truncated: 0 bytes"):
        open_gguf(write(tmp_path, b""))

"""GGUF, versions 2 and 3, little-endian: metadata and tensors of a memory-mapped file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count, length and offset
is compared with the file's size before it is used, so a damaged file costs an error, not memory.
"""

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.weights.checkpoint_file import CheckpointError, check_disjoint, map_file
from kernels.contract import Weight, WeightType

_MAGIC: Final = b"GGUF"
_HEADER_BYTES: Final = 24
_MIN_TENSOR_INFO_BYTES: Final = 8 + 4 + 8 + 4 + 8
_MIN_ENTRY_BYTES: Final = 8 + 4 + 1
_MAX_ARRAY_DEPTH: Final = 4
_DEFAULT_ALIGNMENT: Final = 32

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[Mapping[int, str]] = MappingProxyType(
    {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?",
        10: "Q", 11: "q", 12: "d",
    }
)  # fmt: skip

_TENSOR_TYPES: Final[Mapping[int, WeightType]] = MappingProxyType(
    {
        0: WeightType.F32,
        1: WeightType.F16,
        2: WeightType.Q4_0,
        3: WeightType.Q4_1,
        6: WeightType.Q5_0,
        7: WeightType.Q5_1,
        8: WeightType.Q8_0,
        12: WeightType.Q4_K,
        13: WeightType.Q5_K,
        14: WeightType.Q6_K,
        30: WeightType.BF16,
    }
)
_OTHER_TENSOR_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
        19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
        25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
        39: "MXFP4",
    }
)  # fmt: skip

_OTHER_FILES: Final[Mapping[bytes, str]] = MappingProxyType(
    {
        b"version https://git-lfs": "a Git LFS pointer: `git lfs pull` fetches what it stands for",
        b"<": "a web page or XML, perhaps of a download that failed",
        b"PK": "a zip archive or PyTorch checkpoint",
        b"ggjt": "of a format before GGUF: convert the model again",
    }
)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open GGUF file.

    metadata: key to str, bool, int, float, or a tuple of these for arrays.
    tensors:  name to Weight, whose data is a read-only view into the mapped file. GGUF writes the
              fastest dimension first; shapes here are [rows, cols], slowest first.
    data:     the whole mapped file.
    """

    path: Path
    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, Weight]
    data: mmap.mmap


def open_gguf(path: Path, *, header_only: bool = False) -> GGUFFile:
    """Map a GGUF file and read its directory; no tensor data is touched.

    With `header_only` the data need not be there: tensors have their sizes, but all their bytes
    are 0, those of float32 vectors ones.
    Raises CheckpointError naming the file, the key or tensor, and the reason.
    """
    data = map_file(path, min_bytes=_HEADER_BYTES)
    cursor = _Cursor(path, data)
    if cursor.take(4) != _MAGIC:
        raise CheckpointError(path, f"not a GGUF file: {_what_else(data[:40])}")
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        what = "big-endian files are" if swapped else f"version {version} is"
        raise CheckpointError(path, f"{what} not supported; little-endian versions 2 and 3 are")
    num_tensors, num_entries = cursor.count(), cursor.count()
    cursor.require(num_entries, _MIN_ENTRY_BYTES, "metadata entries")
    metadata: dict[str, object] = {}
    for index in range(num_entries):
        cursor.item = f"metadata entry {index}"
        cursor.item = key = cursor.string()
        if key in metadata:
            raise cursor.error("key occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, metadata), header_only)
    return GGUFFile(path, version, MappingProxyType(metadata), MappingProxyType(tensors), data)


def _what_else(begin: bytes) -> str:
    """What a file is that does not begin with the magic."""
    for prefix, what in _OTHER_FILES.items():
        if begin.startswith(prefix):
            return f"it is {what}"
    if begin[8:10] == b'{"':
        return "it is one of safetensors: name the folder that holds it and its config.json"
    return f"it begins with {begin[:4]!r}, not {_MAGIC!r}"


class _Cursor:
    """Reads the directory front to back; `item` is what an error names."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0
        self.item = ""

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(self.path, reason, item=self.item)

    def require(self, count: int, item_bytes: int, what: str) -> None:
        """Raise unless the rest of the file can hold `count` items of at least `item_bytes`."""
        left = self.size - self.position
        if count * item_bytes > left:
            raise self.error(f"truncated or damaged: {count} {what} cannot fit in {left} bytes")

    def take(self, num_bytes: int) -> bytes:
        self.require(num_bytes, 1, "bytes")
        start = self.position
        self.position = start + num_bytes
        return self.data[start : self.position]

    def scalar(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def count(self) -> int:
        return self.scalar("Q")

    def string(self) -> str:
        return self.text(self.take(self.count()))

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"damaged: a string is not UTF-8 ({error.reason})") from error

    def value(self, type_id: int, depth: int = 0) -> object:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array(depth)
        return self.numbers(type_id, 1)[0]

    def array(self, depth: int) -> tuple[object, ...]:
        element = self.scalar("I")
        count = self.count()
        if element == _STRING:
            return self.strings(count)
        if element != _ARRAY:
            return self.numbers(element, count)
        if depth == _MAX_ARRAY_DEPTH:
            raise self.error("arrays are nested too deeply")
        self.require(count, 12, "arrays")
        return tuple(self.array(depth + 1) for _ in range(count))

    def numbers(self, type_id: int, count: int) -> tuple[object, ...]:
        if type_id not in _SCALARS:
            raise self.error(f"damaged: unknown value type {type_id}")
        code = _SCALARS[type_id]
        self.require(count, struct.calcsize("<" + code), "values")
        raw = self.take(count * struct.calcsize("<" + code))
        return struct.unpack(f"<{count}{code}", raw)

    def strings(self, count: int) -> tuple[str, ...]:
        """Vocabularies hold 50,000 to 250,000 strings: one tight loop, without calls per item."""
        self.require(count, 8, "strings")
        data, size, position = self.data, self.size, self.position
        length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        raw: list[bytes] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                raw.append(data[start:position])
                if position > size:
                    raise self.error("truncated or damaged: a string ends beyond the file")
        except struct.error as error:
            raise self.error("truncated: the file ends inside an array of strings") from error
        self.position = position
        return tuple(map(self.text, raw))


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    cursor.item = "general.alignment"
    alignment = metadata.get(cursor.item, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error(f"{alignment!r} is not a power of two of at least 8")
    return alignment


def _read_tensors(
    cursor: _Cursor, num_tensors: int, alignment: int, header_only: bool
) -> dict[str, Weight]:
    cursor.item = ""
    cursor.require(num_tensors, _MIN_TENSOR_INFO_BYTES, "tensors")
    infos: dict[str, tuple[WeightType, tuple[int, ...], int]] = {}
    for index in range(num_tensors):
        cursor.item = f"tensor {index}"
        cursor.item = name = cursor.string()
        if name in infos:
            raise cursor.error("tensor name occurs twice")
        infos[name] = _read_tensor_info(cursor, alignment)
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, Weight] = {}
    extents: list[tuple[int, int, str]] = []
    for name, (kind, shape, offset) in infos.items():
        cursor.item = name
        rows, cols = (1, *shape)[-2:]
        row_bytes = cols // kind.block_size * kind.block_bytes
        if header_only:
            tensors[name] = Weight(name, kind, shape, _absent(kind, rows, row_bytes))
            continue
        start, end = base + offset, base + offset + rows * row_bytes
        if end > cursor.size:
            raise cursor.error(
                f"truncated: its data ends at byte {end}, the file has {cursor.size}"
            )
        view = np.frombuffer(cursor.data, np.uint8, rows * row_bytes, start)
        tensors[name] = Weight(name, kind, shape, view.reshape(rows, row_bytes))
        extents.append((start, end, name))
    check_disjoint(cursor.path, extents)
    return tensors


def _absent(kind: WeightType, rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Data of that size which takes no memory, but for vectors."""
    if rows == 1 and kind is WeightType.F32:
        return np.ones((1, row_bytes // 4), np.float32).view(np.uint8)
    return np.broadcast_to(np.uint8(0), (rows, row_bytes))


def _read_tensor_info(cursor: _Cursor, alignment: int) -> tuple[WeightType, tuple[int, ...], int]:
    """Type, shape (slowest dimension first) and offset of the tensor whose name was just read."""
    num_dims = cursor.scalar("I")
    if num_dims not in (1, 2):
        raise cursor.error(f"has {num_dims} dimensions; vectors and matrices are supported")
    shape = tuple(cursor.count() for _ in range(num_dims))[::-1]
    type_id, offset = cursor.scalar("I"), cursor.count()
    if type_id not in _TENSOR_TYPES:
        supported = ", ".join(kind.name for kind in _TENSOR_TYPES.values())
        what = _OTHER_TENSOR_TYPES.get(type_id, f"type {type_id}")
        raise cursor.error(f"{what} is not supported; supported are {supported}")
    kind = _TENSOR_TYPES[type_id]
    if 0 in shape:
        raise cursor.error(f"damaged: shape {shape} is empty")
    if shape[-1] % kind.block_size:
        raise cursor.error(
            f"damaged: {shape[-1]} columns are not whole {kind.name} blocks of {kind.block_size}"
        )
    if offset % alignment:
        raise cursor.error(f"damaged: offset {offset} is not aligned to {alignment} bytes")
    return kind, shape, offset

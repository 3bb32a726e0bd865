"""Hugging Face folders: model.safetensors, or shards with an index, memory-mapped.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, data).
The `safetensors` library is not used: without torch it cannot hand out BF16 at all, and its numpy
and raw interfaces copy each tensor.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeGuard

import numpy as np

from engine.weights.checkpoint_file import (
    CheckpointError,
    check_disjoint,
    map_file,
    parse_json_object,
    read_file,
)
from kernels.contract import Weight, WeightType

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"
_TYPES: Final[Mapping[str, WeightType]] = MappingProxyType(
    {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}
)


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The tensors of a folder's safetensors files.

    tensors: name to Weight, whose data is a read-only view into a mapped file.
    files:   the mapped files by name, in rising order of their names.
    """

    path: Path
    tensors: Mapping[str, Weight]
    files: Mapping[str, mmap.mmap]


def open_safetensors_folder(path: Path) -> SafetensorsFolder:
    """Map all weight files of a folder; no tensor data is touched.

    Raises CheckpointError naming the file, the tensor, and the reason.
    """
    weight_map: dict[str, str] | None = None
    if (path / _INDEX).exists():
        weight_map = _read_index(path / _INDEX)
        names = sorted(set(weight_map.values()))
    elif (path / _SINGLE).exists():
        names = [_SINGLE]
    else:
        raise CheckpointError(
            path, f"has neither {_SINGLE} nor {_INDEX}; weights in other formats are never loaded"
        )
    files: dict[str, mmap.mmap] = {}
    tensors: dict[str, Weight] = {}
    for name in names:
        files[name] = map_file(path / name, min_bytes=8)
        for tensor, weight in _read_tensors(path / name, files[name]).items():
            if weight_map is not None and weight_map.get(tensor) != name:
                raise CheckpointError(path / name, f"{_INDEX} does not place it here", item=tensor)
            tensors[tensor] = weight
    for tensor in sorted((weight_map or {}).keys() - tensors.keys()):
        raise CheckpointError(path / _INDEX, "is in no file, against the index", item=tensor)
    return SafetensorsFolder(path, MappingProxyType(tensors), MappingProxyType(files))


def _read_index(path: Path) -> dict[str, str]:
    weight_map = parse_json_object(path, read_file(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "damaged: not an object of file names", item="weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(path, f"{name!r} is not the name of a file", item=tensor)
    return weight_map


def _read_tensors(path: Path, data: mmap.mmap) -> dict[str, Weight]:
    (header_bytes,) = struct.unpack("<Q", data[:8])
    start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > len(data):
        raise CheckpointError(
            path, f"truncated or damaged: a header of {header_bytes} bytes in {len(data)} bytes"
        )
    header = parse_json_object(path, data[8:start], what="header")
    header.pop(_METADATA, None)
    tensors: dict[str, Weight] = {}
    extents: list[tuple[int, int, str]] = []
    for name, info in header.items():
        kind, shape, begin, end = _check_info(path, name, info)
        if start + end > len(data):
            raise CheckpointError(
                path,
                f"truncated: its data ends at byte {start + end}, the file has {len(data)}",
                item=name,
            )
        view = np.frombuffer(data, np.uint8, end - begin, start + begin)
        rows, cols = (1, *shape)[-2:]
        tensors[name] = Weight(name, kind, shape, view.reshape(rows, cols * kind.block_bytes))
        extents.append((begin, end, name))
    check_disjoint(path, extents)
    return tensors


def _check_info(
    path: Path, name: str, info: object
) -> tuple[WeightType, tuple[int, ...], int, int]:
    """Type, shape, begin and end of a header entry."""
    if not isinstance(info, dict):
        raise CheckpointError(path, "damaged: header entry is not an object", item=name)
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise CheckpointError(
            path, f"{dtype} is not supported; supported are {', '.join(_TYPES)}", item=name
        )
    if not _whole_numbers(shape, least=1) or len(shape) not in (1, 2):
        raise CheckpointError(path, f"shape {shape} is not that of a vector or a matrix", item=name)
    if not _whole_numbers(offsets, least=0) or len(offsets) != 2:
        raise CheckpointError(path, f"damaged: data_offsets {offsets}", item=name)
    kind, (begin, end) = _TYPES[dtype], offsets
    if end - begin != math.prod(shape) * kind.block_bytes:
        raise CheckpointError(
            path, f"damaged: {end - begin} bytes for shape {shape} of {dtype}", item=name
        )
    return kind, tuple(shape), begin, end


def _whole_numbers(value: object, *, least: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= least for v in value)

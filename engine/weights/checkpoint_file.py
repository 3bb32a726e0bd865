"""What both checkpoint formats share: the error, mapped files, JSON objects, overlap checks."""

import json
import mmap
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

Buffer = bytes | mmap.mmap


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, the tensor or key, and why."""

    def __init__(self, path: Path, reason: str, *, item: str = "") -> None:
        super().__init__(f"{path}: {item}: {reason}" if item else f"{path}: {reason}")
        self.path = path
        self.item = item
        self.reason = reason


def map_file(path: Path, *, min_bytes: int) -> mmap.mmap:
    """The whole file, mapped read-only; unmapped when nothing refers to it any more.

    Raises CheckpointError when it cannot be read or is shorter than `min_bytes` (at least 1).
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < min_bytes:
                raise CheckpointError(path, f"truncated: {size} bytes is too short for a header")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error


def read_file(path: Path) -> bytes:
    """A small file's contents. Raises CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error


def parse_json_object(path: Path, data: bytes, *, what: str = "") -> dict[str, object]:
    """`data`, which came from `path`, as a JSON object. A key given twice is an error."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        return values

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"damaged: not valid JSON ({error})", item=what) from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "damaged: not a JSON object", item=what)
    return value


def check_disjoint(path: Path, extents: Iterable[tuple[int, int, str]]) -> None:
    """Raise CheckpointError if two tensors' (start, end, name) share bytes."""
    for (_, end, first), (start, _, second) in pairwise(sorted(extents)):
        if start < end:
            raise CheckpointError(path, f"damaged: its data overlaps that of {first}", item=second)

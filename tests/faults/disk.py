"""A disk that is full and one that tells lies, as far as a test can have them: a small file system
that a file fills, and files whose bytes are turned over."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_FILLER = "filler"
_STRIDE = 64 << 10
"""One byte of each so many: several in every page."""


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of that size, in an empty folder; skips where none can be had."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of its own takes the right to mount it: {mounted.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """No room at all on it, for a block."""
    filler = disk / _FILLER
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


def damage(folder: Path) -> None:
    """Turn over some bytes of every page that the second tier has on disk now."""
    for path in folder.glob("disk-*"):
        with contextlib.suppress(FileNotFoundError):  # its engine is gone, and so it is
            _turn_over(path)


def _turn_over(path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        descriptor, end = file.fileno(), 0
        with contextlib.suppress(OSError):  # nothing is behind the last bytes
            while True:
                begin = os.lseek(descriptor, end, os.SEEK_DATA)
                end = os.lseek(descriptor, begin, os.SEEK_HOLE)
                for place in range(begin, end, _STRIDE):
                    (old,) = os.pread(descriptor, 1, place)
                    os.pwrite(descriptor, bytes([old ^ 0xFF]), place)

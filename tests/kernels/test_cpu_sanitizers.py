"""The native kernels under the compiler's sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES, library_path

GXX = shutil.which("g++")
SANITIZE = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
# Head shapes, storages and page sizes that take each way through the kernels; both modes.
GRID = (
    *("q4_0", "q5_k", "q8_0", "bf16", "mixed", "every", "across", "partial", "(group and 7)"),
    *(
        "(heads and 128)",
        "(head_dim and 40)",
        "multiple",
        "(codes and 1)",
        "(codes and windows)",
        "(page and 4)",
    ),
)
READ_TOO_FAR = """
import numpy as np
from kernels.cpu.backend import CpuBackend
backend = CpuBackend(threads=1)
data = np.ones(1000, dtype=np.uint64)
backend._library.hw_read(backend._handle.address, data.ctypes.data, data.nbytes + 64)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(GXX is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a Python process uses kernels that watch memory and arithmetic."""
    cache = tmp_path_factory.mktemp("cache")
    compiler = cache / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {GXX} "$@" {SANITIZE}\n')
    compiler.chmod(0o755)
    library_path(cache / "headwater", {"CXX": str(compiler)})
    assert GXX is not None
    asan = subprocess.check_output([GXX, "-print-file-name=libasan.so"], text=True).strip()
    return os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "CXX": "none",  # what is there is used
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_the_grid_under_the_address_and_undefined_behaviour_sanitizers(
    sanitized: dict[str, str],
) -> None:
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "1500"),
        *("tests/kernels/test_cpu_agreement.py", "-k", " or ".join(GRID)),
    )
    ended = subprocess.run(command, env=sanitized, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def test_the_address_sanitizer_sees_the_kernels(sanitized: dict[str, str]) -> None:
    """Else the grid would pass for nothing."""
    command = (sys.executable, "-c", READ_TOO_FAR)
    ended = subprocess.run(command, env=sanitized, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "heap-buffer-overflow" in ended.stderr
    assert "hw_read" in ended.stderr


def test_the_pool_under_the_thread_sanitizer(tmp_path: Path) -> None:
    program = tmp_path / "pool_stress"
    assert GXX is not None
    sources = (Path(__file__).with_name("pool_stress.cpp"), SOURCES / "pool.cpp")
    subprocess.run(
        [
            *(GXX, "-std=c++20", "-O1", "-g", "-mavx2", "-fsanitize=thread", "-pthread"),
            *(f"-I{SOURCES}", *map(str, sources), "-o", str(program)),
        ],
        check=True,
    )
    # The sanitizer's shadow needs addresses that are not randomised too far.
    command = [shutil.which("setarch") or "setarch", "-R", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "sound\n"), ended.stderr[-4000:]

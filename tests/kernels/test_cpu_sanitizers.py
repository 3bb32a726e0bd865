"""The thread pool under the compiler's thread sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES

GXX = shutil.which("g++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(GXX is None, reason="needs g++"),
]


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

"""Ahead-of-time compilation, in a process without the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def compile_check(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile_check", *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(600)
def test_representatives_of_all_kernels_fit(tmp_path: Path) -> None:
    done = compile_check(tmp_path, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {path.stem for path in (ROOT / "kernels" / "triton").glob("*.py")}
    shown = {line.split()[0] for line in done.stdout.splitlines() if "  80 " in line}
    assert shown <= kernels
    assert {"decode_attention", "prefill_attention", "cascade_attention"} <= shown
    assert {"rope_write", "rms_norm", "merge_states", "copy_pages"} <= shown


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_variants_fit(tmp_path: Path) -> None:
    done = compile_check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_interpreter_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile_check"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "the interpreter compiles nothing" in done.stderr

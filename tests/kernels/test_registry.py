"""Which backend is picked, and what is said about it."""

import subprocess
import sys
from typing import Any

import pytest

from kernels import registry
from kernels.contract import BackendUnavailable
from kernels.reference import ReferenceBackend
from kernels.registry import select_backend


def unavailable(threads: int, exact: bool) -> Any:
    raise BackendUnavailable("no C++ compiler: install g++")


def test_reference_by_name() -> None:
    selection = select_backend("reference", threads=1, exact=False)
    assert isinstance(selection.backend, ReferenceBackend)
    assert selection.name == selection.backend.name == "reference"


def test_auto_falls_back_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_cpu", unavailable)
    selection = select_backend("auto", threads=1, exact=True)
    assert selection.name == "reference"
    assert selection.reason.startswith("SLOW")
    assert "no C++ compiler: install g++" in selection.reason


def test_cpu_by_name_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_cpu", unavailable)
    with pytest.raises(BackendUnavailable, match="no C"):
        select_backend("cpu", threads=1, exact=False)


def test_triton_by_name_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_has_gpu", lambda: False)
    with pytest.raises(BackendUnavailable, match="No CUDA device"):
        select_backend("triton", threads=1, exact=False)
    monkeypatch.setattr(registry, "_has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendUnavailable, match="needs triton, which is not installed"):
        select_backend("triton", threads=1, exact=False)


def test_a_gpu_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver that shows one; the interpreter stands in for the device."""
    monkeypatch.setattr(registry, "_has_gpu", lambda: True)
    selection = select_backend("auto", threads=1, exact=True)
    assert selection.name == selection.backend.name == "triton"
    assert selection.reason == "a GPU is here (triton-interpreted-f32)"


def test_auto_says_why_it_is_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_has_gpu", lambda: False)
    selection = select_backend("auto", threads=1, exact=False)
    if selection.name == "cpu":
        assert "not triton: No CUDA device" in selection.reason
    selection.backend.close()


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_cpu", unavailable)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailable, match=r"install g\+\+.*pip install torch"):
        select_backend("auto", threads=1, exact=False)


def test_unknown_name() -> None:
    with pytest.raises(BackendUnavailable, match="no backend 'gpu'; there are auto, triton, cpu"):
        select_backend("gpu", threads=0, exact=False)


def test_choosing_cpu_imports_no_torch() -> None:
    code = """
import sys
from kernels.contract import BackendUnavailable
from kernels.registry import select_backend
try:
    selection = select_backend("cpu", threads=1, exact=True)
    assert selection.name == "cpu" and "exact" in selection.backend.numeric_mode
    selection.backend.close()
except BackendUnavailable as error:
    sys.stdout.write(str(error))
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if result.stdout:
        pytest.skip(result.stdout)

"""Picks the backend, once, and says what it picked and why."""

import ctypes
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kernels.contract import Backend, BackendUnavailable

BACKENDS: Final = ("auto", "triton", "cpu", "reference")


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen backend; `reason` is one sentence for the log."""

    backend: Backend[Any, Any]
    name: str
    reason: str


def select_backend(name: str, *, threads: int, exact: bool) -> Selection:
    """The backend of that name; "auto" is the fastest that runs here: triton on a GPU, else cpu.

    `threads` 0 leaves the number to the backend. `exact` keeps activations in float32, which the
    reference always does. torch is imported only when triton or the reference is chosen. Raises
    BackendUnavailable saying what is missing and what to do.
    """
    if name not in BACKENDS:
        raise BackendUnavailable(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    if name == "reference":
        return Selection(_reference(threads), name, "the reference backend was asked for")
    no_gpu = ""
    if name in ("auto", "triton"):
        try:
            backend = _triton(exact)
        except BackendUnavailable as error:
            if name == "triton":
                raise
            no_gpu = f"; not triton: {error}"
        else:
            return Selection(backend, "triton", f"a GPU is here ({backend.numeric_mode})")
    try:
        backend = _cpu(threads, exact)
    except BackendUnavailable as error:
        if name == "cpu":
            raise
        return _fallback(threads, error)
    reason = f"the CPU backend runs here ({backend.numeric_mode}){no_gpu}"
    return Selection(backend, "cpu", reason)


def _fallback(threads: int, error: BackendUnavailable) -> Selection:
    try:
        backend = _reference(threads)
    except BackendUnavailable as missing:
        raise BackendUnavailable(f"No backend can run here. {error} {missing}") from error
    reason = f"SLOW: the reference backend, more than ten times slower, for want of cpu: {error}"
    return Selection(backend, "reference", reason)


def _triton(exact: bool) -> Backend[Any, Any]:
    """Whether there is a GPU is asked of the driver, so that torch is not loaded for a no."""
    if not _has_gpu():
        raise BackendUnavailable(
            "No CUDA device: there is no NVIDIA driver (libcuda.so.1), or it shows none."
        )
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise BackendUnavailable(
                f"The Triton backend needs {package}, which is not installed: "
                "`.venv/bin/pip install -e '.[gpu]'`."
            )
    from kernels.triton.backend import TritonBackend

    return TritonBackend(exact=exact)


def _has_gpu() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def _cpu(threads: int, exact: bool) -> Backend[Any, Any]:
    from kernels.cpu.backend import CpuBackend

    return CpuBackend(threads=threads, exact=exact)


def _reference(threads: int) -> Backend[Any, Any]:
    if importlib.util.find_spec("torch") is None:
        pip = Path(sys.executable).parent / "pip"
        raise BackendUnavailable(
            f"The reference backend needs torch, which is not installed: `{pip} install torch`."
        )
    from kernels.reference import ReferenceBackend

    return ReferenceBackend(threads=threads)

"""The client's turns on a core are short."""

import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.slices import SLICE_NS

ROOT = Path(__file__).parent.parent.parent
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_ns(pid: int) -> int:
    """Of a process's first thread, as the kernel says."""
    buffer = ctypes.create_string_buffer(56)
    done = ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], pid, buffer, 56, 0)
    assert done == 0
    runtime: int = struct.unpack_from("Q", buffer, 24)[0]
    return runtime


def test_the_client_has_short_slices_when_it_talks_to_a_server() -> None:
    usual_ns = slice_ns(os.getpid()) if platform.machine() in SCHED_GETATTR else 0
    if not usual_ns:
        pytest.skip("the kernel has no slices of one's own, or does not tell")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        server.settimeout(60)
        process = subprocess.Popen(
            [sys.executable, "-m", "loadtest", "run", "--url", url],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            connection, _ = server.accept()
            with connection:
                found_ns = slice_ns(process.pid)
        finally:
            process.kill()
            process.wait()
    assert usual_ns > SLICE_NS
    assert found_ns == SLICE_NS

"""Whose turns on a core are short."""

import ctypes
import platform
import struct
import threading

import pytest

from service.slices import SLICE_NS, take_short_slices

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_ns() -> int:
    """Of the calling thread, as the kernel says."""
    buffer = ctypes.create_string_buffer(56)
    done = ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], 0, buffer, 56, 0)
    assert done == 0
    runtime: int = struct.unpack_from("Q", buffer, 24)[0]
    return runtime


def test_a_thread_takes_short_slices_and_gives_none_to_those_it_starts() -> None:
    usual_ns = slice_ns() if platform.machine() in SCHED_GETATTR else 0
    if not usual_ns:
        pytest.skip("the kernel has no slices of one's own, or does not tell")
    found: list[int] = []

    def begin() -> None:
        assert take_short_slices()
        child = threading.Thread(target=lambda: found.append(slice_ns()))
        child.start()
        child.join()
        found.append(slice_ns())

    # A thread of its own: the slice stays with it.
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert usual_ns > SLICE_NS
    assert found == [usual_ns, SLICE_NS]

"""Short turns on a core for the client: on a machine of its own it would wait for none."""

import ctypes
import os
import platform
import struct
import sys
from types import MappingProxyType
from typing import Final

SLICE_NS: Final = 100_000
"""The shortest the kernel takes."""
_SCHED_SETATTR: Final = MappingProxyType({"x86_64": 314, "aarch64": 274})
_RESET_ON_FORK: Final = 1
_ATTRIBUTES: Final = struct.Struct("@IIQiIQQQ")
"""`struct sched_attr` of sched_setattr(2), as far as it is set: size, policy, flags, nice,
priority, runtime, deadline, period."""


def take_short_slices() -> bool:
    """Ask for short slices for the calling thread, and none of those that it starts; whether that
    was taken.

    A server that computes on all cores of the client's machine lets what it sent wait for the rest
    of a slice, up to 4 ms, as no network would: since Linux 6.12 what wakes goes before one with
    longer slices at once. The client gets no more time for it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if os.sched_getscheduler(0) != os.SCHED_OTHER or nice < 0:
        return False  # somebody chose otherwise; and what is forked would lose a priority
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0
    )
    taken: int = ctypes.CDLL(None).syscall(number, 0, attributes, 0)
    return taken == 0

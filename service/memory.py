"""Memory that is given back: bodies of megabytes must not stay with the process after their end."""

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 64 << 10
_KEPT_BYTES: Final = 4 << 20


def give_back_freed_memory() -> None:
    """Have glibc map what is large by itself, and trim its heap. Left alone it raises these bounds
    with the largest block that was ever freed (mallopt(3)), and keeps such blocks from then on.
    Nothing happens where the C library is another one."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)

"""How many pages: what the model needs, what the machine has, and a refusal with both numbers."""

import os
from pathlib import Path

from engine.api import EngineError
from kernels.contract import KVLayout

SMALLEST_REQUEST = 512
"""A pool must hold one request of this many tokens, or of the context where that is less."""

_SHARE_OF_AVAILABLE = 0.25
_SHARE_OF_DEVICE = 0.8
"""The rest is for activations and the matrix library's own."""
_FULL_CONTEXTS = 16
_CGROUP = Path("/sys/fs/cgroup")


def count_pages(
    layout: KVLayout,
    max_context: int,
    kv_memory_bytes: int,
    free_device_bytes: int | None = None,
) -> int:
    """Pages that `kv_memory_bytes` hold; 0 chooses: a quarter of the available memory, at most
    what 16 requests of the whole context need, or four fifths of what a device has left.

    Raises EngineError where that is more than there is, or less than one small request.
    """
    on_device = free_device_bytes is not None
    available = available_memory_bytes() if free_device_bytes is None else free_device_bytes
    share = _SHARE_OF_DEVICE if on_device else _SHARE_OF_AVAILABLE
    chosen = kv_memory_bytes or int(available * share)
    if chosen > available:
        raise EngineError(
            f"--kv-memory asks for {_size(chosen)}, but {_size(available)} of memory are "
            f"available: ask for less"
        )
    tokens = min(max_context, SMALLEST_REQUEST)
    least = -(-tokens // layout.page_size)
    num_pages = chosen // layout.page_bytes
    if num_pages < least:
        raise EngineError(
            f"{_size(chosen)} of KV memory hold {num_pages * layout.page_size} tokens; one request "
            f"of {tokens} tokens needs {_size(least * layout.page_bytes)}: give --kv-memory at "
            f"least that"
        )
    if kv_memory_bytes or on_device:
        return num_pages
    return min(num_pages, _FULL_CONTEXTS * -(-max_context // layout.page_size))


def available_memory_bytes() -> int:
    """What this process may still take: the machine's memory without swap, or its container's."""
    limits = [_machine_bytes()]
    try:
        maximum = (_CGROUP / "memory.max").read_text().strip()
        if maximum != "max":
            limits.append(int(maximum) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no version 2 cgroup here
    return max(0, min(limits))


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"

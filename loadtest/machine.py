"""Names the machine, so that figures are never quoted without one."""

import os
import platform
from pathlib import Path

from loadtest.measure.result import Machine


def this_machine() -> Machine:
    """The CPU's own name, the cores this process may use, memory and system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(cpu=_cpu(), cores=cores or 1, memory_gib=_memory_gib(), system=platform.system())


def _cpu() -> str:
    """Name, and family and model where they tell more: clouds often hide the rest."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        said.setdefault(name.strip(), value.strip())
    name = said.get("model name") or platform.machine()
    if any(letter.isdigit() for letter in name) or "cpu family" not in said:
        return name
    return f"{name} (family {said['cpu family']}, model {said.get('model', '?')})"


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return 0.0

"""Watches how much memory a server holds: the proportional set size (PSS) of its process and of all
that descend from it, where what several map counts once (Linux only)."""

import asyncio
import contextlib
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
TICK_S = 0.25


def tree_pss_bytes(pid: int) -> int:
    """PSS of a process and its descendants; processes that end meanwhile count as nothing.

    Raises ValueError where it cannot be told: no such process, another user's, or no Linux.
    """
    try:
        total = _pss_bytes(pid)
        for child in _descendants(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += _pss_bytes(child)
    except OSError as error:
        raise ValueError(
            f"the memory of process {pid} cannot be read ({error.strerror}): it must run under "
            "Linux, on this machine and as the same user"
        ) from error
    return total


def _pss_bytes(pid: int) -> int:
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.removesuffix("kB")) * 1024
    return 0


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; state and parent follow it.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children[parent].append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found[1:]


class MemoryWatch:
    """Looks between `__aenter__` and `__aexit__`, which look too; `peak_bytes` is the most seen.

    Each look walks the server's page tables, a few milliseconds. Once the server is gone, what
    was seen of it stands.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0

    async def __aenter__(self) -> "MemoryWatch":
        await self._look()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._look()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._look()

    async def _look(self) -> None:
        try:
            now = await asyncio.to_thread(tree_pss_bytes, self._pid)
        except ValueError:
            return
        self.peak_bytes = max(self.peak_bytes, now)

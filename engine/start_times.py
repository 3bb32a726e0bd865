"""How long the parts of a start take, for the log."""

import time
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = 100


class StartTimes:
    """Marks what has been done since the last mark; the first part began with the process."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._parts: list[tuple[str, float]] = [("process and imports", _process_age_s())]

    def mark(self, name: str) -> None:
        """What was done since the last mark is `name`."""
        now_s = time.monotonic()
        self._parts.append((name, now_s - self._last_s))
        self._last_s = now_s

    def rest(self) -> None:
        """Nothing was done since the last mark but wait: a spare engine."""
        self._last_s = time.monotonic()

    def __str__(self) -> str:
        """`0.52 s: process and imports 0.21, model 0.04`, parts in order."""
        whole_s = sum(taken_s for _, taken_s in self._parts)
        parts = ", ".join(f"{name} {taken_s:.2f}" for name, taken_s in self._parts)
        return f"{whole_s:.2f} s: {parts}"


def _process_age_s() -> float:
    """Since this process began, to a hundredth; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS_PER_S
    return 0.0

"""What this machine can do at most: memory bandwidth and multiply-adds, measured once and kept.

The figures are the best of some short runs. They are kept per processor, thread count and numeric
mode in the user's cache directory; delete the file to measure again.
"""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

READ_BYTES: Final = 256 << 20
MAC_ROUNDS: Final = 400_000
RUNS: Final = 5


@dataclass(frozen=True, slots=True)
class Peaks:
    """`flops_per_s` counts two for a multiply-add, in the numbers the backend multiplies."""

    bytes_per_s: float
    flops_per_s: float

    def best_of(self, other: "Peaks") -> "Peaks":
        """The larger of each figure."""
        return Peaks(
            max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        )


@runtime_checkable
class Measurable(Protocol):
    """A backend that can be measured."""

    @property
    def numeric_mode(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def read_memory(self, data: NDArray[np.uint8]) -> int:
        """Read the array once with all threads."""

    def multiply(self, integer: bool, rounds: int) -> int:
        """Multiply-adds on registers with all threads; how many."""


def machine_peaks(backend: object, cache_dir: Path) -> Peaks | None:
    """The best figures ever measured here, a short measurement now included: what was measured
    on a busy machine is corrected at a later start. None for a backend that cannot be measured."""
    if not isinstance(backend, Measurable):
        return None
    path = cache_dir / "peaks.json"
    key = f"{_processor()}, {backend.threads} threads, {backend.numeric_mode}"
    kept = _read(path)
    best = _peaks(kept.get(key))
    now = measure_peaks(backend, runs=1 if best else RUNS)
    best = now.best_of(best or now)
    with suppress(OSError):
        _write(path, {**kept, key: asdict(best)})
    return best


def _peaks(kept: Any) -> Peaks | None:
    """What a file says, if it makes sense."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        found = Peaks(float(kept["bytes_per_s"]), float(kept["flops_per_s"]))
        if 0 < found.bytes_per_s < math.inf and 0 < found.flops_per_s < math.inf:
            return found
    return None


def measure_peaks(backend: Measurable, runs: int = RUNS) -> Peaks:
    """The best of some short runs of each."""
    data = np.ones(READ_BYTES, dtype=np.uint8)
    integer = "exact" not in backend.numeric_mode
    read_s = min(_timed(lambda: backend.read_memory(data))[0] for _ in range(runs))
    done = [_timed(lambda: backend.multiply(integer, MAC_ROUNDS)) for _ in range(runs)]
    macs_per_s = max(count / seconds for seconds, count in done)
    return Peaks(READ_BYTES / read_s, 2 * macs_per_s)


def _timed(run: Callable[[], int]) -> tuple[float, int]:
    start_s = time.perf_counter()
    result = run()
    return time.perf_counter() - start_s, result


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return "unknown processor"


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(path: Path, kept: dict[str, Any]) -> None:
    """All or nothing, as several engines may start at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(kept, indent=1))
    part.replace(path)

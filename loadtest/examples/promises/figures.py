"""What was measured, beside what was promised."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


def quantile(values: Sequence[float], share: float) -> float:
    """NaN of nothing."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


@dataclass(slots=True)
class Sheet:
    """Lines of one part, printed as they come; `missed` counts promises that were not kept."""

    missed: list[str] = field(default_factory=list)

    def say(self, line: str = "") -> None:
        """Anything."""
        print(line, flush=True)

    def judge(
        self, what: str, value: float, limit: float, unit: str, *, least: bool = False
    ) -> None:
        """A figure beside its target: at most `limit`, or at least."""
        holds = value >= limit if least else value <= limit
        sign = "≥" if least else "≤"
        verdict = "kept" if holds else "MISSED"
        self.say(f"  {what:<58}{value:>9.2f} {unit:<4} {sign} {limit:.2f} {unit:<4} {verdict}")
        if not holds:
            self.missed.append(what)

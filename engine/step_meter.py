"""What the steps of an engine were like: integers added per step, told as distributions."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from engine.scheduling.step_plan import ScheduledChunk
from engine.types import Distribution

STEP_NS_BOUNDS: Final = tuple(
    int(ms * 1_000_000)
    for ms in (0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)
)
TOKEN_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Tally:
    """A distribution that grows; one sample costs a search in a short list."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0

    def add(self, value: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def distribution(self) -> Distribution:
        """As it stands now."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class StepMeter:
    """Counts steps as they end. Touched by the engine's thread only."""

    def __init__(self) -> None:
        self.step_ns = Tally(STEP_NS_BOUNDS)
        self.step_tokens = Tally(TOKEN_BOUNDS)
        self.chunk_tokens = Tally(TOKEN_BOUNDS)
        self._last_end_ns = 0

    def note(self, chunks: Sequence[ScheduledChunk], start_ns: int, end_ns: int) -> int:
        """A step computed the chunks; how long it took. It began when the one before it ended,
        unless the loop had nothing to do in between."""
        num_tokens = 0
        for chunk in chunks:
            count = chunk.end - chunk.start
            num_tokens += count
            if chunk.start < chunk.request.prefill_end:
                self.chunk_tokens.add(count)
        self.step_tokens.add(num_tokens)
        took_ns = end_ns - (self._last_end_ns or start_ns)
        self.step_ns.add(took_ns)
        self._last_end_ns = end_ns
        return took_ns

    def rest(self) -> None:
        """Nothing is left to do: the time until the next step begins is nobody's."""
        self._last_end_ns = 0

"""What the steps of an engine were like: integers added per step, told as distributions."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.scheduling.step_plan import ScheduledChunk
from engine.stats import Distribution, StepWork
from kernels.peaks import Peaks
from kernels.roofline import StepCosts

STEP_NS_BOUNDS: Final = tuple(
    int(ms * 1_000_000)
    for ms in (0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000)
)
RECENT_STEPS: Final = 128
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
    """Counts and weighs steps as they end. Touched by the engine's thread only.

    What a step has shown, the machine can do: peaks that were measured while it was busy, or
    beyond caches that hold the weights, are raised to it, so that nothing uses more than all.
    """

    def __init__(self, costs: StepCosts | None = None, peaks: Peaks | None = None) -> None:
        """Without `costs`, or without this machine's `peaks`, bytes, operations or their times are
        0."""
        self._costs = costs
        self._peaks = peaks
        self._sums: dict[str, list[int]] = {}
        self._recent: deque[StepWork] = deque(maxlen=RECENT_STEPS)
        self.step_ns = Tally(STEP_NS_BOUNDS)
        self.step_tokens = Tally(TOKEN_BOUNDS)
        self.chunk_tokens = Tally(TOKEN_BOUNDS)
        self._last_end_ns = 0

    def note(
        self, chunks: Sequence[ScheduledChunk], start_ns: int, end_ns: int, kernel_ns: int
    ) -> StepWork:
        """A step computed the chunks, `kernel_ns` of it in the backend; what it did. It began when
        the one before it ended, unless the loop had nothing to do in between."""
        num_tokens = num_prefills = num_rows = 0
        sequences: list[tuple[int, int]] = []
        for chunk in chunks:
            count = chunk.end - chunk.start
            num_tokens += count
            num_rows += len(chunk.logits)
            sequences.append((count, chunk.end))
            if chunk.start < chunk.request.prefill_end:
                num_prefills += 1
                self.chunk_tokens.add(count)
        self.step_tokens.add(num_tokens)
        wall_ns = end_ns - (self._last_end_ns or start_ns)
        self.step_ns.add(wall_ns)
        self._last_end_ns = end_ns
        flops, memory = self._costs.cost(sequences, num_rows) if self._costs else (0, 0)
        if self._peaks is not None and kernel_ns > 0:
            rates = memory * 1e9 / kernel_ns, flops * 1e9 / kernel_ns
            if rates[0] > self._peaks.bytes_per_s or rates[1] > self._peaks.flops_per_s:
                self._peaks = self._peaks.best_of(Peaks(*rates))
        kind = "decode" if not num_prefills else "mixed"
        if num_prefills == len(sequences):
            kind = "prefill"
        times = self._times(memory, flops)
        step = StepWork(kind, 1, num_tokens, wall_ns, kernel_ns, *times, flops, memory)
        self._recent.append(step)
        sums = self._sums.setdefault(kind, [0] * len(step.numbers))
        for place, number in enumerate(step.numbers):
            sums[place] += number
        return step

    @property
    def peaks(self) -> Peaks | None:
        """What the machine is known to do."""
        return self._peaks

    def work(self) -> tuple[StepWork, ...]:
        """The sums of all steps, by kind."""
        sums = (StepWork(kind, *numbers) for kind, numbers in self._sums.items())
        return tuple(map(self._timed, sums))

    def recent_steps(self) -> tuple[StepWork, ...]:
        """The last ones, oldest first."""
        return tuple(map(self._timed, self._recent))

    def _timed(self, work: StepWork) -> StepWork:
        """With the times that its bytes and operations take at the present peaks."""
        memory_ns, compute_ns = self._times(work.memory_bytes, work.flops)
        return msgspec.structs.replace(work, memory_ns=memory_ns, compute_ns=compute_ns)

    def _times(self, memory_bytes: int, flops: int) -> tuple[int, int]:
        if self._peaks is None:
            return 0, 0
        return (
            int(memory_bytes * 1e9 / self._peaks.bytes_per_s),
            int(flops * 1e9 / self._peaks.flops_per_s),
        )

    def rest(self) -> None:
        """Nothing is left to do: the time until the next step begins is nobody's."""
        self._last_end_ns = 0

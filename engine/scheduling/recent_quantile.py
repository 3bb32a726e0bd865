"""A quantile of the last numbers of a series."""

from bisect import bisect_left, insort
from collections import deque


class RecentQuantile:
    """Of the last `memory` numbers; as long as there were fewer, `first` stands for the others.
    To add one costs two searches in a short list."""

    def __init__(self, share: float, memory: int, first: float) -> None:
        self._recent = deque([first] * memory, maxlen=memory)
        self._sorted = [first] * memory
        self._index = min(int(share * memory), memory - 1)

    @property
    def value(self) -> float:
        """At most 1 - `share` of the numbers are larger."""
        return self._sorted[self._index]

    def add(self, number: float) -> None:
        """The oldest one is forgotten."""
        del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(number)
        insort(self._sorted, number)

"""A quantile of the last numbers of a series."""

from bisect import bisect_left, insort
from collections import deque


class RecentQuantile:
    """Of the last `memory` numbers, and before there were any, of a few times `first`. To add one
    costs two searches in a short list."""

    def __init__(self, share: float, memory: int, first: float) -> None:
        self._share = share
        self._recent = deque([first] * (memory // 4), maxlen=memory)
        self._sorted = list(self._recent)

    @property
    def value(self) -> float:
        """About 1 - `share` of the numbers are larger."""
        return self._sorted[int(self._share * len(self._sorted))]

    def add(self, number: float) -> None:
        """The oldest one is forgotten."""
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(number)
        insort(self._sorted, number)

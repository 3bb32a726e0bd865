"""A quantile of the last numbers of a series."""

from bisect import bisect_left, bisect_right, insort
from collections import deque


class RecentQuantile:
    """Of the last `memory` numbers, and before there were any, of a few times `first`. To add one
    costs two searches in a short list."""

    def __init__(self, memory: int, first: float) -> None:
        self._recent = deque([first] * (memory // 4), maxlen=memory)
        self._sorted = list(self._recent)

    def value(self, share: float) -> float:
        """About 1 - `share` of the numbers, less than all, are larger."""
        return self._sorted[int(share * len(self._sorted))]

    def above(self, number: float) -> float:
        """The share of the numbers that are larger than this one."""
        count = len(self._sorted)
        return (count - bisect_right(self._sorted, number)) / count

    def add(self, number: float) -> None:
        """The oldest one is forgotten."""
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(number)
        insort(self._sorted, number)

"""How much of a prediction came true."""

from bisect import bisect_left
from typing import Final

import numpy as np
from numpy.typing import NDArray

_AGAIN: Final = 3
"""So many tokens in a row are found again after others that the prediction has not."""


def count_predicted(prediction: NDArray[np.int32], said: NDArray[np.int32]) -> int:
    """How many tokens of the prediction stand in what was said, in its order: the prediction is
    followed from its beginning, and after what is not in it from the next place on where the last
    few tokens stand. Takes time in proportion to both."""
    expected, tokens = prediction.tolist(), said.tolist()
    size = min(_AGAIN, len(expected))
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(expected) - size + 1):
        places.setdefault(tuple(expected[place : place + size]), []).append(place)
    count = at = 0
    lost_since = -1
    for index, token in enumerate(tokens):
        if lost_since < 0:
            if at < len(expected) and token == expected[at]:
                count, at = count + 1, at + 1
                continue
            lost_since = index
        if size and index - lost_since + 1 >= size:
            there = places.get(tuple(tokens[index - size + 1 : index + 1]), [])
            found = bisect_left(there, at)
            if found < len(there):
                count, at, lost_since = count + size, there[found] + size, -1
    return count

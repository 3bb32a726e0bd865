"""What of a prediction is counted as said."""

import numpy as np
import pytest

from engine.scripted import text_script
from service.prediction import count_predicted
from tests.service.calls import ask, stream
from tests.service.conftest import run_server

WHOLE = list(range(50, 80))
FENCE = [1, 2, 3]


@pytest.mark.parametrize(
    ("prediction", "said", "count"),
    [
        (WHOLE, WHOLE, 30),
        (WHOLE, WHOLE[:12], 12),
        (WHOLE, [*FENCE, *WHOLE[:15]], 15),
        (WHOLE, [*WHOLE[:10], 7, *WHOLE[11:]], 29),
        (WHOLE, [*WHOLE[20:], *WHOLE[:10]], 10),
        (WHOLE, [*FENCE, *WHOLE[:2]], 0),
        (WHOLE, FENCE, 0),
        (WHOLE, [], 0),
        ([50, 51], [*FENCE, 50, 51, 9], 2),
        ([5], [5, 5, 5], 1),
        ([5] * 9, [*FENCE, *[5] * 20], 9),
        ([], [1], 0),
    ],
)
def test_what_stands_in_both_in_order_is_counted(
    prediction: list[int], said: list[int], count: int
) -> None:
    numbers = np.array(prediction, dtype=np.int32), np.array(said, dtype=np.int32)
    assert count_predicted(*numbers) == count


@pytest.mark.parametrize("seed", range(20))
def test_it_never_counts_more_than_the_longest_common_subsequence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prediction, said = (rng.integers(0, 3, 40, dtype=np.int32) for _ in range(2))
    assert 0 < count_predicted(prediction, said) <= longest_common(prediction, said)


def longest_common(one: np.ndarray, other: np.ndarray) -> int:
    """By the plain table."""
    row = [0] * (len(other) + 1)
    for token in one:
        before = row
        row = [0]
        for place, against in enumerate(other):
            same = before[place] + 1 if token == against else 0
            row.append(max(same, before[place + 1], row[-1]))
    return row[-1]


def test_the_edge_counts_it_whatever_the_engine_drafted() -> None:
    """It was counted in the engine's steps, where all streams wait for it."""
    with run_server(text_script("the river and the sea")) as server:
        asked = {"prediction": {"type": "content", "content": "the river or the sea"}}
        details = ask(server, **asked)["usage"]["completion_tokens_details"]
        ended = stream(server, **asked)[-1]["usage"]["completion_tokens_details"]
    assert details == ended
    assert details["accepted_prediction_tokens"] == len("the river  the sea")
    assert details["rejected_prediction_tokens"] == len("or")

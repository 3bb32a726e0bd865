"""A quantile of the last numbers, beside all of them sorted."""

import random

from engine.scheduling.recent_quantile import RecentQuantile


def test_it_is_that_of_the_last_numbers() -> None:
    """Of a few guesses first, which are forgotten like any others."""
    rng = random.Random(7)
    quantile = RecentQuantile(40, 1.1)
    assert quantile.value(0.95) == quantile.value(0.0) == 1.1
    numbers = [1.1] * 10
    for _ in range(500):
        numbers.append(rng.choice((1.0, 1.1, rng.lognormvariate(0.0, 0.2))))
        quantile.add(numbers[-1])
        last = sorted(numbers[-40:])
        for share in (0.0, 0.5, 0.95):
            assert quantile.value(share) == last[int(share * len(last))]


def test_one_in_twenty_is_larger() -> None:
    quantile = RecentQuantile(100, 0.0)
    for number in range(1000):
        quantile.add(float(number % 100))
    assert sum(number > quantile.value(0.95) for number in range(100)) == 4
    assert quantile.above(94) == 0.05
    assert quantile.above(99) == 0 and quantile.above(-1) == 1

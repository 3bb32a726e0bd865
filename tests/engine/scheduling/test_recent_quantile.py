"""A quantile of the last numbers, beside all of them sorted."""

import random

from engine.scheduling.recent_quantile import RecentQuantile


def test_it_is_that_of_the_last_numbers() -> None:
    rng = random.Random(7)
    quantile = RecentQuantile(0.95, 40, 1.1)
    assert quantile.value == 1.1
    numbers = [1.1] * 40
    for _ in range(500):
        numbers.append(rng.choice((1.0, 1.1, rng.lognormvariate(0.0, 0.2))))
        quantile.add(numbers[-1])
        assert quantile.value == sorted(numbers[-40:])[38]


def test_one_in_twenty_is_larger() -> None:
    quantile = RecentQuantile(0.95, 100, 0.0)
    for number in range(1000):
        quantile.add(float(number % 100))
    assert sum(number > quantile.value for number in range(100)) == 4

"""How prompts share the room of a step."""

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.itl_controller import LongStep, Room
from engine.scheduling.prefill_lanes import Claim, share
from engine.scheduling.step_time import StepTimeModel


def claims(*wants: int) -> list[Claim]:
    """Of one tenant and urgency, in the order of their arrival."""
    return [
        Claim(0, want, (0, True, float(want), 0.0, i), (0, True, 0.0, float(i), i))
        for i, want in enumerate(wants)
    ]


def room(tokens: int, ms: float = math.inf) -> Room:
    return Room(tokens, ms, StepTimeModel())


def test_a_lone_one_takes_all() -> None:
    assert share(claims(6000), room(512)) == [512]
    assert share(claims(60), room(512)) == [60]
    assert share([], room(512)) == []


def test_half_for_the_least_work_half_for_the_oldest() -> None:
    assert share(claims(6000, 5000, 400), room(512)) == [256, 0, 256]
    assert share(claims(6000, 5000, 400), room(512), by_size=False) == [512, 0, 0]


def test_a_short_one_ends_at_once_and_leaves_the_rest() -> None:
    assert share(claims(6000, 20, 6000), room(512)) == [492, 20, 0]


def test_the_oldest_keeps_half_whatever_comes() -> None:
    assert share(claims(6000, *[100] * 50), room(512))[0] == 256


def test_somebody_moves_where_there_is_no_room() -> None:
    assert share(claims(50, 20), room(100, ms=-1.0)) == [1, 0]


def test_the_first_is_not_passed_where_half_of_the_room_is_too_little_for_it() -> None:
    """It has so much behind it that half is used up by reading that: of equal prompts the last one
    would go first."""
    model = StepTimeModel()
    ms = model.reading_ms(5000) + 1.5 * model.longer_ms(5000, 1)
    long = LongStep(2 * ms, 100 * ms, ms)
    first = Claim(5000, 1000, (0, True, 1000.0, 0.0, 0), (0, True, 0.0, 0.0, 0))
    later = Claim(0, 6000, (0, True, 6000.0, 0.0, 1), (0, True, 0.0, 1.0, 1))
    alone = share([first], Room(100, ms, model, long))
    assert alone[0] > 0
    assert share([first, later], Room(100, ms, model, long))[0] == alone[0]


def test_a_chunk_that_a_long_step_would_outdo_is_not_computed() -> None:
    """Nine tokens in a long step are less than one in each of ten others, and more than in eight;
    what ends its prompt is computed at once."""
    model = StepTimeModel()
    reading_ms = model.reading_ms(6000)
    ms = reading_ms + 1.5 * model.longer_ms(6000, 1)
    long_ms = reading_ms + 9.5 * model.longer_ms(6000, 1)

    def shares(cycle_ms: float, want: int) -> list[int]:
        one = Claim(6000, want, (0, True, 1.0, 0.0, 0), (0, True, 0.0, 0.0, 0))
        return share([one], Room(100, ms, model, LongStep(long_ms, cycle_ms, 50.0)))

    assert shares(8 * (50.0 + ms), 100) == [0]
    assert shares(10 * (50.0 + ms), 100) == [1]
    assert shares(8 * (50.0 + ms), 1) == [1]


def bare_room(num_streams: int, bare_ms: float, ms: float = 1000.0) -> Room:
    """Of a step with no target, whose other costs are known."""
    return Room(10_000, ms, StepTimeModel(), None, num_streams, bare_ms)


def test_few_short_ones_are_computed_one_after_another() -> None:
    """By the model 80 tokens take 166 ms, and a step without prompts 10."""
    assert share(claims(80, 80, 80), bare_room(7, 10.0)) == [80, 0, 0]
    assert share(claims(80, 70, 80), bare_room(7, 10.0)) == [0, 70, 0]
    assert share(claims(80, 70, 80), bare_room(7, 10.0), oldest_first=True) == [80, 0, 0]
    assert share(claims(80, 70, 80), bare_room(7, 10.0), by_size=False) == [80, 0, 0]


def test_those_that_are_shorter_than_the_rest_of_a_step_are_computed_together() -> None:
    """A token takes 2 ms: the second delays the first by as much, and is spared 10. Five of them
    would make the step of the streams longer by a third."""
    assert share(claims(1, 1), bare_room(7, 10.0)) == [1, 1]
    assert share(claims(4, 4), bare_room(0, 10.0)) == [4, 4]
    assert share(claims(5, 5), bare_room(7, 10.0)) == [5, 0]


def test_of_many_a_step_takes_as_many_as_pay() -> None:
    few = sum(share(claims(*[80] * 8), bare_room(0, 10.0)))
    many = sum(share(claims(*[80] * 8), bare_room(0, 10.0), num_waiting=100))
    assert few == 80
    assert many == 480  # six delayed by 166 ms are more than 94 delayed by 10


def test_a_short_one_takes_more_than_half_of_the_room_if_it_ends() -> None:
    """Both would take a second step with half of the room each."""
    assert share(claims(80, 70), bare_room(7, 10.0, ms=200.0)) == [0, 70]
    assert share(claims(80, 70), bare_room(7, math.inf, ms=200.0)) == [49, 48]


def test_a_long_oldest_one_keeps_its_half_beside_short_ones() -> None:
    shares = share(claims(6000, 80, 80, 80), bare_room(7, 10.0, ms=400.0))
    assert shares[1] == 80
    assert shares[0] > 80


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 2000))
def test_nothing_wasted_nothing_exceeded(wants: list[int], budget: int) -> None:
    shares = share(claims(*wants), room(budget))
    assert sum(shares) == min(budget, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 5000)), min_size=1, max_size=20),
    st.floats(0.1, 500.0),
)
def test_time_is_not_exceeded_and_not_wasted(prompts: list[tuple[int, int]], ms: float) -> None:
    """By the model's own costs; what is left is less than one more token of any."""
    model = StepTimeModel()
    given = [
        Claim(past, want, (0, True, want, 0.0, i), (0, True, 0.0, i, i))
        for i, (past, want) in enumerate(prompts)
    ]
    shares = share(given, Room(10**6, ms, model))
    cost = sum(model.chunk_ms(claim.past, n) for claim, n in zip(given, shares, strict=True) if n)
    if sum(shares) > 1:
        assert cost <= ms * 1.0001
    for claim, n in zip(given, shares, strict=True):
        if n < claim.want:
            more = model.longer_ms(claim.past + n, 1) if n else model.chunk_ms(claim.past, 1)
            assert cost + more > ms * 0.9999

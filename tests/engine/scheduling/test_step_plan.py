"""How a token budget is shared."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.step_plan import fair_shares


def test_equal_shares_for_long_ones() -> None:
    assert fair_shares([1000, 1000, 1000, 1000], 512) == [128, 128, 128, 128]


def test_a_short_one_ends_at_once_and_leaves_the_rest() -> None:
    assert fair_shares([6000, 20, 6000], 512) == [246, 20, 246]


def test_a_lone_one_takes_all() -> None:
    assert fair_shares([6000], 512) == [512]
    assert fair_shares([60], 512) == [60]
    assert fair_shares([], 512) == []


def test_fewer_tokens_than_requests() -> None:
    assert fair_shares([5, 9, 7, 9], 2) == [1, 0, 1, 0]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 2000))
def test_nothing_wasted_nothing_exceeded(wants: list[int], budget: int) -> None:
    shares = fair_shares(wants, budget)
    assert sum(shares) == min(budget, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    cut = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert not cut or max(cut) - min(cut) <= 1
    assert not cut or max(shares) <= max(cut) + 1

"""Who waits for whom."""

import numpy as np
import pytest

from prefix_cache.cache import PageTable
from prefix_cache.in_flight import InFlight
from tests.prefix_cache.oracle import as_array, namespace

A, B = namespace("a"), namespace("b")
PROMPT = [*range(10)]


def running(num_tokens: int = 0) -> PageTable:
    return PageTable(A, np.empty(0, dtype=np.int64), num_tokens)


def test_the_same_prompt_in_the_same_namespace_is_followed() -> None:
    flight: InFlight[str] = InFlight(4)
    flight.register("first", A, as_array(PROMPT), running())
    assert flight.leader(A, as_array(PROMPT), 0) == "first"
    assert flight.leader(A, as_array([*PROMPT[:4], 99]), 0) == "first"
    assert flight.leader(A, as_array([*PROMPT[:3], 99]), 0) is None
    assert flight.leader(A, as_array(PROMPT[:3]), 0) is None
    assert flight.leader(A, as_array([]), 0) is None
    assert flight.leader(B, as_array(PROMPT), 0) is None


def test_only_full_pages_beyond_the_match_are_worth_waiting_for() -> None:
    flight: InFlight[str] = InFlight(4)
    flight.register("first", A, as_array(PROMPT), running())
    assert flight.leader(A, as_array(PROMPT), 7) == "first"
    assert flight.leader(A, as_array(PROMPT), 8) is None
    assert flight.leader(A, as_array([*PROMPT[:6], 99, 98]), 4) is None


def test_what_is_published_is_not_waited_for() -> None:
    """A follower whose match was limited must not wait for pages that are there already."""
    flight: InFlight[str] = InFlight(4)
    table = running(5)
    flight.register("first", A, as_array(PROMPT), table)
    assert flight.leader(A, as_array(PROMPT), 3) == "first"
    table.num_tokens = 8
    assert flight.leader(A, as_array(PROMPT), 3) is None


def test_the_one_that_goes_furthest_leads_and_the_next_takes_over() -> None:
    flight: InFlight[int] = InFlight(4)
    flight.register(1, A, as_array(PROMPT[:4]), running())
    flight.register(2, A, as_array(PROMPT), running())
    flight.register(3, A, as_array(PROMPT), running())
    for expected in (2, 3, 1):
        assert flight.leader(A, as_array(PROMPT), 0) == expected
        flight.unregister(expected)
    assert flight.leader(A, as_array(PROMPT), 0) is None
    flight.unregister(1)
    assert len(flight) == 0


def test_a_key_is_registered_once() -> None:
    flight: InFlight[int] = InFlight(4)
    flight.register(1, A, as_array(PROMPT), running())
    with pytest.raises(KeyError):
        flight.register(1, A, as_array(PROMPT), running())


def test_a_page_equal_at_the_match_does_not_hide_a_difference_before_it() -> None:
    flight: InFlight[int] = InFlight(2)
    flight.register(1, A, as_array([1, 1, 2, 2, 3, 3]), running())
    assert flight.leader(A, as_array([1, 1, 9, 9, 3, 3]), 4) is None

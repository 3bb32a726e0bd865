"""Speeds of decoding and of prompts, by hand."""

import pytest

from loadtest.measure.sample import Usage
from loadtest.measure.speeds import decode_tok_per_s, median_prefill_tok_per_s
from tests.loadtest.samples import run_of, sample


def test_decoding_counts_while_the_most_streams_run() -> None:
    """Both run from 11 to 13: the first has pieces at 11.5, 12, 12.5 and 13 then, the second at
    12 and 13."""
    first = sample(times_s=(10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5))
    second = sample(times_s=(11.0, 12.0, 13.0))
    assert decode_tok_per_s([first, second]) == pytest.approx(6 / 2)


def test_a_piece_of_several_tokens_counts_them_all() -> None:
    one = sample(times_s=(10.0, 11.0), usage=Usage(100, 8))
    assert decode_tok_per_s([one]) == pytest.approx(4)


def test_streams_after_one_another_are_one_stream_at_a_time() -> None:
    first, second = sample(times_s=(10.0, 11.0)), sample(times_s=(20.0, 21.0, 22.0))
    assert decode_tok_per_s([first, second]) == pytest.approx(1)


def test_a_prompt_counts_what_no_cache_had() -> None:
    fresh = sample(times_s=(10.5,), usage=Usage(100, 1, 50))
    later = sample(1, times_s=(10.001,), usage=Usage(100, 1, 50))
    assert median_prefill_tok_per_s([fresh, later]) == pytest.approx(100)


def test_without_data_there_is_no_figure() -> None:
    assert decode_tok_per_s([sample(times_s=(10.0,))]) is None
    assert median_prefill_tok_per_s([sample(times_s=())]) is None
    figures = run_of([sample(times_s=())]).figures
    assert not {"decode_tok_per_s", "prefill_tok_per_s"} & set(figures)

"""Sizing the pool, and the refusals."""

import pytest

from engine.api import EngineError
from engine.execution.kv_memory import available_memory_bytes, count_pages
from kernels.contract import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16)
PAGE_BYTES = LAYOUT.page_bytes


def test_what_was_asked_for() -> None:
    assert count_pages(LAYOUT, 4096, 100 * PAGE_BYTES) == 100
    assert count_pages(LAYOUT, 4096, 101 * PAGE_BYTES - 1) == 100


def test_the_default_is_bounded_by_sixteen_contexts() -> None:
    assert count_pages(LAYOUT, 1000, 0) == 16 * 63


def test_the_default_is_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.execution.kv_memory.available_memory_bytes", lambda: 4000 * PAGE_BYTES
    )
    assert count_pages(LAYOUT, 1_000_000, 0) == 1000


def test_pages_of_a_device_take_most_of_what_it_has_left() -> None:
    assert count_pages(LAYOUT, 100, 0, 4000 * PAGE_BYTES) == 3200
    assert count_pages(LAYOUT, 100, 7 * PAGE_BYTES, 4000 * PAGE_BYTES) == 7
    with pytest.raises(EngineError, match="--kv-memory asks for"):
        count_pages(LAYOUT, 100, 4001 * PAGE_BYTES, 4000 * PAGE_BYTES)


def test_less_than_one_small_request_is_refused() -> None:
    assert count_pages(LAYOUT, 8192, 32 * PAGE_BYTES) == 32
    with pytest.raises(EngineError, match=r"hold 496 tokens; one request of 512 tokens needs"):
        count_pages(LAYOUT, 8192, 31 * PAGE_BYTES)
    assert count_pages(LAYOUT, 100, 7 * PAGE_BYTES) == 7
    with pytest.raises(EngineError, match=r"hold 96 tokens; one request of 100 tokens needs"):
        count_pages(LAYOUT, 100, 6 * PAGE_BYTES)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(EngineError, match=r"--kv-memory asks for 1048576\.0 GiB, but .* available"):
        count_pages(LAYOUT, 8192, 2**50)


def test_available_memory_is_of_this_machine() -> None:
    assert 2**20 < available_memory_bytes() < 2**46

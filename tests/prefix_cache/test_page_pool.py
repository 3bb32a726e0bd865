"""Counts of the pool follow references and listings; nothing is free twice."""

import numpy as np
import pytest

from prefix_cache.page_pool import CacheError, PageIds, PagePool, PoolCounts
from prefix_cache.radix_tree import RadixForest


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int64)


def test_pages_are_given_out_once_and_return() -> None:
    pool = PagePool(5, RadixForest(5, 4))
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4]
    pool.unref(first)
    assert pool.counts() == PoolCounts(total=5, free=2, cached=0, referenced=3, pinned=0)
    assert sorted(pool.allocate(2).tolist()) == sorted(first.tolist())


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(3, RadixForest(3, 4))
    pool.allocate(1)
    with pytest.raises(CacheError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_page_is_free_only_when_neither_referenced_nor_listed() -> None:
    pool = PagePool(2, RadixForest(2, 4))
    page = pool.allocate(1)
    pool.ref(page)
    pool.enlist(page)
    pool.unref(page)
    assert (pool.counts().referenced, pool.counts().cached) == (1, 0)
    pool.unref(page)
    assert (pool.counts().referenced, pool.counts().cached, pool.num_free) == (0, 1, 1)
    pool.ref(page)
    pool.delist(page)
    assert (pool.counts().referenced, pool.num_free) == (1, 1)
    pool.unref(page)
    assert pool.num_free == 2


def test_a_reference_too_few_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(3, RadixForest(3, 4))
    pages = pool.allocate(2)
    pool.enlist(pages)
    pool.unref(pages[:1])
    with pytest.raises(CacheError, match="no reference to drop"):
        pool.unref(pages)
    assert pool.refs[pages].tolist() == [0, 1]
    assert pool.counts() == PoolCounts(total=3, free=1, cached=1, referenced=1, pinned=0)


def test_appending_needs_an_unowned_page_that_ends_at_the_slot() -> None:
    pool = PagePool(1, RadixForest(1, 4))
    (page,) = pool.allocate(1).tolist()
    pool.seal(page, 3)
    pool.seal(page, 2)
    assert not pool.may_append(page, 3)
    pool.owned[page] = False
    assert [slot for slot in range(5) if pool.may_append(page, slot)] == [3]


def test_a_page_forgets_seal_and_owner_when_it_becomes_free() -> None:
    pool = PagePool(1, RadixForest(1, 4))
    page = pool.allocate(1)
    pool.seal(0, 4)
    pool.unref(page)
    assert not pool.owned[0]
    assert pool.sealed[0] == 0
    assert pool.free_ids.tolist() == [0]

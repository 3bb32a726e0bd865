"""Match, insert, split and cut of the trees, without a pool."""

import random

import numpy as np
import pytest

from prefix_cache.page_pool import PageIds
from prefix_cache.radix_tree import Insertion, RadixForest, TokenIds, Use, common_prefix
from tests.prefix_cache.oracle import as_array, common_length, namespace

A, B = namespace("a"), namespace("b")


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int64)


def insert(forest: RadixForest, tokens: list[int], *pages: int) -> Insertion:
    return forest.insert(A, None, 0, as_array(tokens), ids(*pages))


def found(forest: RadixForest, tokens: list[int]) -> tuple[int, list[int]]:
    match = forest.match(A, as_array(tokens))
    return match.num_tokens, match.pages.tolist()


@pytest.mark.parametrize("length", [0, 1, 7, 1000])
def test_common_prefix(length: int) -> None:
    a: TokenIds = np.arange(length, dtype=np.int32)
    for differing in {0, length // 2, length - 1} - {-1}:
        b = a.copy()
        if length:
            b[differing] += 1 << 24
        assert common_prefix(a, b) == (differing if length else 0)
    assert common_prefix(a, np.arange(length + 3, dtype=np.int32)) == length


def test_a_prefix_is_found_token_by_token_also_inside_pages() -> None:
    forest = RadixForest(20, 4)
    insert(forest, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0, 1, 2)
    assert found(forest, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == (10, [0, 1, 2])
    assert found(forest, [1, 2, 3, 4, 5, 6, 7]) == (7, [0, 1])
    assert found(forest, [1, 2, 3, 4, 5, 9]) == (5, [0, 1])
    assert found(forest, [1, 2, 3, 4]) == (4, [0])
    assert found(forest, [2, 1]) == (0, [])
    assert found(forest, []) == (0, [])
    assert forest.match(B, as_array([1, 2, 3])).num_tokens == 0


def test_parting_inside_a_page_makes_siblings_and_the_longer_start_is_found() -> None:
    forest = RadixForest(20, 4)
    insert(forest, [1, 1, 1, 1, 2, 2, 2, 2], 0, 1)
    done = insert(forest, [1, 1, 1, 1, 2, 2, 3, 3], 9, 2)
    assert (done.canonical.tolist(), done.listed.tolist()) == ([0], [2])
    insert(forest, [1, 1, 1, 1, 2, 300, 3, 3], 9, 3)
    assert found(forest, [1, 1, 1, 1, 2, 2, 3, 9]) == (7, [0, 2])
    assert found(forest, [1, 1, 1, 1, 2, 300, 4]) == (6, [0, 3])
    (upper,) = forest.roots[A].children
    assert len(upper.children) == 3
    assert forest.node_of(0) is upper


def test_a_longer_version_of_a_partial_page_takes_its_place() -> None:
    forest = RadixForest(20, 4)
    insert(forest, [1, 2], 0)
    assert insert(forest, [1, 2, 3], 0).replaced is None
    done = insert(forest, [1, 2, 3, 4, 5], 7, 8)
    assert (done.replaced, done.listed.tolist()) == (0, [7, 8])
    assert forest.node_of(0) is None
    assert len(forest.roots[A].children) == 1
    assert found(forest, [1, 2, 3, 4, 5]) == (5, [7, 8])


def test_what_is_covered_is_not_stored_again() -> None:
    forest = RadixForest(20, 4)
    insert(forest, [1, 2, 3, 4, 5, 6], 0, 1)
    done = insert(forest, [1, 2, 3, 4, 5], 7, 8)
    assert (done.canonical.tolist(), done.listed.tolist(), done.replaced) == ([0], [], None)
    assert forest.node_of(8) is None


def test_insert_goes_on_behind_a_page_that_was_split_off() -> None:
    forest = RadixForest(20, 2)
    insert(forest, [1, 1, 2, 2, 3, 3], 0, 1, 2)
    insert(forest, [1, 1, 9, 9], 8, 3)
    forest.insert(A, 2, 3, as_array([4, 4]), ids(4))
    forest.insert(A, 1, 2, as_array([3, 5]), ids(5))
    assert found(forest, [1, 1, 2, 2, 3, 3, 4, 4]) == (8, [0, 1, 2, 4])
    assert found(forest, [1, 1, 2, 2, 3, 5]) == (6, [0, 1, 5])


def test_cut_takes_pages_from_the_end_and_emptied_nodes_and_trees_away() -> None:
    forest = RadixForest(20, 2)
    insert(forest, [1, 1, 2, 2, 3], 0, 1, 2)
    insert(forest, [1, 1, 4, 4], 8, 3)
    leaf = forest.node_of(2)
    other = forest.node_of(3)
    assert leaf is not None
    assert other is not None
    leaf.use = Use(5, 1, 2, 3)
    assert forest.cut(leaf, 1).tolist() == [2]
    assert found(forest, [1, 1, 2, 2, 3]) == (4, [0, 1])
    assert forest.cut(leaf, 1).tolist() == [1]
    assert found(forest, [1, 1, 2, 2]) == (2, [0])
    forest.cut(other, 1)
    upper = forest.node_of(0)
    assert upper is not None
    assert upper.use == Use(5, 1, 2, 3, whole=False)
    assert forest.cut(upper, 1).tolist() == [0]
    assert forest.roots == {}


def test_cut_of_a_leaf_leaves_no_trace_for_the_next_growth() -> None:
    forest = RadixForest(20, 2)
    insert(forest, [1, 1, 2, 2, 3, 3], 0, 1, 2)
    leaf = forest.node_of(0)
    assert leaf is not None
    forest.cut(leaf, 2)
    insert(forest, [1, 1, 7], 9, 5)
    assert found(forest, [1, 1, 2, 2, 3, 3]) == (2, [0])
    assert found(forest, [1, 1, 7, 2]) == (3, [0, 5])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_match_never_trusts_a_digest(page_size: int) -> None:
    """GHSA-rm76-4mrf-v9r8: prompts that any weak digest confuses are told apart, token by token.

    All prompts have the same length and the same multiset and sum of tokens, and most share page
    contents at other places of the prompt.
    """
    rng = random.Random(7)
    forest = RadixForest(200_000, page_size)
    letters = [1, 256, 65536, 1 << 24] * 12
    stored: list[list[int]] = []
    next_page = 0
    for _ in range(300):
        tokens = rng.sample(letters, len(letters))
        expected = max((common_length(tokens, other) for other in stored), default=0)
        assert forest.match(A, as_array(tokens)).num_tokens == expected
        num_pages = -(-len(tokens) // page_size)
        insert(forest, tokens, *range(next_page, next_page + num_pages))
        next_page += num_pages
        stored.append(tokens)

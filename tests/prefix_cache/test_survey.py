"""Surveys of the trees: exact when nothing changes, bounded in pieces, safe when much does."""

import random

import numpy as np

from prefix_cache.cache import PrefixCache
from prefix_cache.radix_tree import Node, RadixForest
from prefix_cache.survey import Survey, Surveyor
from tests.prefix_cache.oracle import as_array, namespace

P = 2


def forest_of(num_prompts: int, length: int, seed: int = 1) -> RadixForest:
    """Random prompts over few tokens, so that they share prefixes, in two namespaces."""
    draw = random.Random(seed)
    forest = RadixForest(num_prompts * length, P)
    page = 0
    for index in range(num_prompts):
        tokens = as_array([draw.randrange(3) for _ in range(length)])
        pages = np.arange(page, page + length // P, dtype=np.int64)
        page += len(pages)
        forest.insert(namespace("ab"[index % 2]), None, 0, tokens, pages)
    return forest


def all_nodes(forest: RadixForest) -> list[Node]:
    found: list[Node] = []
    stack: list[Node] = [child for root in forest.roots.values() for child in root.children]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children
    return found


def subtree_pages(node: Node) -> int:
    return node.num_pages + sum(map(subtree_pages, node.children))


def whole(surveyor: Surveyor) -> Survey:
    survey = surveyor.advance(10**6)
    assert survey is not None
    return survey


def check(survey: Survey) -> None:
    """Ancestors first, and each node under its own closest one."""
    for index, seen in enumerate(survey.nodes):
        assert seen.parent < index
        if seen.parent < 0:
            assert seen.node.parent is None
        else:
            assert seen.node.parent is survey.nodes[seen.parent].node


def test_a_small_forest_is_told_whole() -> None:
    forest = forest_of(40, 12)
    survey = whole(Surveyor(forest, 1000))
    nodes = all_nodes(forest)
    check(survey)
    assert {id(seen.node) for seen in survey.nodes if seen.node.parent} == set(map(id, nodes))
    assert survey.num_nodes == len(nodes)
    assert survey.num_pages == sum(node.num_pages for node in nodes)
    for seen in survey.nodes:
        assert seen.subtree_pages == subtree_pages(seen.node)


def test_of_a_large_one_the_largest_subtrees_with_their_ancestors() -> None:
    forest = forest_of(2000, 24)
    nodes = all_nodes(forest)
    survey = whole(Surveyor(forest, 64))
    check(survey)
    assert len(survey.nodes) == 64
    assert survey.num_nodes == len(nodes) > 1000
    smallest = min(seen.subtree_pages for seen in survey.nodes)
    kept = {id(seen.node) for seen in survey.nodes}
    assert all(subtree_pages(node) <= smallest for node in nodes if id(node) not in kept)


def test_no_piece_visits_more_than_it_may() -> None:
    forest = forest_of(500, 24)
    num_visits = len(all_nodes(forest)) + len(forest.roots)
    surveyor = Surveyor(forest, 64)
    pieces = 1
    while (survey := surveyor.advance(10)) is None:
        pieces += 1
    assert pieces >= num_visits / 10
    assert survey.num_nodes == num_visits - 2
    assert whole(surveyor).num_nodes == survey.num_nodes, "the next survey begins anew"


def test_what_goes_while_it_is_surveyed_is_left_out() -> None:
    cache = PrefixCache(400, P)
    draw = random.Random(3)
    for tenant in "ab" * 10:
        tokens = as_array([draw.randrange(3) for _ in range(16)])
        table = cache.match(namespace(tenant), tokens).table
        assert cache.extend(table, 16) is not None
        cache.publish(table, tokens, 16, tail=True)
        cache.release(table)
    surveyor = cache.surveyor(1000)
    assert surveyor.advance(15) is None
    cache.flush()
    survey = whole(surveyor)
    check(survey)
    assert [seen for seen in survey.nodes if seen.node.num_pages] == []

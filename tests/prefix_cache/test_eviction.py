"""Who is cut first, and what is never cut."""

import numpy as np

from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import Evictor
from prefix_cache.page_pool import PagePool
from prefix_cache.radix_tree import Node, RadixForest
from tests.prefix_cache.oracle import Sequence, Server, as_array, namespace

A = namespace("a")
P = 2


def a_server(num_pages: int) -> Server:
    return Server(PrefixCache(num_pages, P), P, num_pages)


def finished(server: Server, tokens: list[int]) -> None:
    sequence = server.start(A, tokens)
    server.run(sequence, len(tokens), tail=True)
    server.release(sequence)


def occupy(server: Server, num_pages: int) -> Sequence:
    """A request that takes this many pages from the free and cached ones."""
    sequence = server.start(namespace("other"), [9] * (num_pages * P))
    assert server.plan(sequence, num_pages * P)
    server.check()
    return sequence


def lengths(server: Server, *prompts: list[int]) -> list[int]:
    return [server.cache.peek(A, as_array(prompt)) for prompt in prompts]


def test_the_least_recently_used_goes_first_from_its_end() -> None:
    server = a_server(6)
    old, new = [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]
    finished(server, old)
    finished(server, new)
    server.release(server.start(A, old))
    occupy(server, 1)
    assert lengths(server, old, new) == [5, 4]
    occupy(server, 3)
    assert lengths(server, old, new) == [4, 0]


def test_asking_for_the_length_is_no_use() -> None:
    server = a_server(4)
    finished(server, [1, 1, 2, 2])
    finished(server, [3, 3, 4, 4])
    assert lengths(server, [1, 1, 2, 2]) == [4]
    occupy(server, 1)
    assert lengths(server, [1, 1, 2, 2], [3, 3, 4, 4]) == [2, 4]


def test_a_common_prefix_outlives_its_branches_and_has_their_age() -> None:
    server = a_server(6)
    finished(server, [1, 1, 2, 2])
    finished(server, [1, 1, 3, 3])
    finished(server, [5, 5])
    server.release(server.start(A, [1, 1, 3, 3]))
    occupy(server, 2 + 3)
    assert lengths(server, [1, 1, 3, 3], [5, 5]) == [2, 0]


def test_a_page_is_last_used_when_its_request_ends() -> None:
    server = a_server(6)
    first, second = server.start(A, [1, 1, 2, 2]), server.start(A, [3, 3, 4, 4])
    server.run(first, 4)
    server.run(second, 4)
    server.release(second)
    server.release(first)
    occupy(server, 3)
    assert lengths(server, [1, 1, 2, 2], [3, 3, 4, 4]) == [4, 2]


def test_what_a_request_reads_is_not_cut() -> None:
    server = a_server(5)
    finished(server, [1, 1, 2, 2, 3])
    reader = server.start(A, [1, 1, 2, 2], limit=3)
    assert server.cache.extend(server.start(A, [7] * 10).table, 8) is None
    occupy(server, 3)
    assert lengths(server, [1, 1, 2, 2, 3]) == [4]
    server.release(reader)
    occupy(server, 2)
    assert lengths(server, [1, 1, 2, 2, 3]) == [0]


def test_a_tail_cut_down_to_a_reader_is_evictable_when_the_reader_ends() -> None:
    server = a_server(3)
    finished(server, [1, 1, 2, 2, 3])
    reader = server.start(A, [1, 1])
    assert server.cache.flush() == 2
    server.release(reader)
    assert server.cache.audit().cached == 1
    assert server.cache.flush() == 1


def test_another_order_can_be_given() -> None:
    """Longest leaf last: the order is asked again when a leaf reaches the top of the heap."""
    pool, forest = PagePool(6), RadixForest(6, P)
    evictor = Evictor(pool, forest, order=lambda node: node.num_tokens)
    leaves: list[Node] = []
    for tokens in ([1, 1, 1, 1], [2, 2]):
        pages = pool.allocate(len(tokens) // P)
        pool.enlist(pages)
        forest.insert(A, None, 0, as_array(tokens), pages)
        pool.unref(pages)
        leaf = forest.node_of(int(pages[0]))
        assert leaf is not None
        evictor.offer(leaf)
        leaves.append(leaf)
    page = pool.allocate(2)
    pool.enlist(page)
    forest.insert(A, int(leaves[1].pages[-1]), 1, as_array([2, 2, 2, 2]), page)
    pool.unref(page)
    assert evictor.evict(1) == 1
    assert [leaf.num_tokens for leaf in leaves] == [2, 6]
    assert evictor.evict(9) == 4
    assert np.array_equal(np.sort(pool.free_ids), np.arange(6))

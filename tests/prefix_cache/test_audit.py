"""The audit names what is wrong: each book is falsified once."""

from collections.abc import Callable

import numpy as np
import pytest

from prefix_cache.cache import AuditError, CacheError, PrefixCache, Repair
from tests.prefix_cache.oracle import Server, as_array, namespace

A = namespace("a")


@pytest.fixture
def server() -> Server:
    """Two finished prompts that part inside a page, and a running request."""
    server = Server(PrefixCache(12, 4), 4, 12)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [9, 9]):
        sequence = server.start(A, tokens)
        server.run(sequence, len(tokens), tail=True)
        server.release(sequence)
    running = server.start(A, [1, 2, 3, 4, 5, 6, 7])
    server.run(running, 7)
    server.check()
    return server


def forget_reference(server: Server) -> None:
    server.cache._pool.refs[server.live[0].table.pages[-1]] -= 1


def forget_hold(server: Server) -> None:
    node = server.cache._forest.node_of(server.live[0].table.pages[0])
    assert node is not None
    node.ends.clear()


def hold_less(server: Server) -> None:
    node = server.cache._forest.node_of(server.live[0].table.pages[0])
    assert node is not None
    node.num_held -= 1


def forget_listing(server: Server) -> None:
    server.cache._pool.listed[server.live[0].table.pages[0]] = False


def free_twice(server: Server) -> None:
    free_ids = server.cache._pool.free_ids
    free_ids[0] = free_ids[1]


def forget_owner(server: Server) -> None:
    server.cache._pool.owned[server.live[0].table.pages[1]] = False


def unseal(server: Server) -> None:
    server.cache._pool.sealed[server.live[0].table.pages[0]] = 1


def drift(server: Server) -> None:
    server.cache._pool._num_referenced += 1


def swap_siblings(server: Server) -> None:
    root = server.cache._forest.roots[A]
    root.children.reverse()
    root.child_keys.reverse()


def move_page(server: Server) -> None:
    root = server.cache._forest.roots[A]
    server.cache._forest._node_of[root.children[0].pages] = root


def lose_candidate(server: Server) -> None:
    for child in server.cache._forest.roots[A].children:
        child.queued = -1


def add_empty_tree(server: Server) -> None:
    server.cache._forest.insert(
        namespace("b"), None, 0, np.empty(0, np.int32), np.empty(0, np.int64)
    )


def forget_lease(server: Server) -> None:
    lease = server.cache.leases.grant(A, as_array([]), 60)
    assert lease is None
    server.cache._pool.pin(server.live[0].table.page_ids[:1])


def lease_of_foreign_pages(server: Server) -> None:
    lease = server.cache.leases.grant(A, as_array([1, 2, 3, 4]), 60)
    assert lease is not None
    server.cache._pool.unpin(lease.pages)
    lease.pages[:] = server.live[0].table.pages[1]
    server.cache._pool.pin(lease.pages)


def use_foreign_page(server: Server) -> None:
    table = server.live[0].table
    table.page_ids[:2] = table.pages[1::-1]


@pytest.mark.parametrize(
    ("falsify", "sentence"),
    [
        (forget_reference, "page .: 1 references counted, 0 recorded"),
        (forget_hold, r"held as \(\{1: 1\}, 0, 1\), recorded \(\{\}, 0, 1\)"),
        (hold_less, r"held as \(\{1: 1\}, 0, 1\), recorded \(\{1: 1\}, 0, 0\)"),
        (forget_listing, "page .: listed by 1 nodes, recorded False"),
        (free_twice, r"page \d+: 2 times in the free list"),
        (forget_owner, "page .: 1 append owners, recorded False"),
        (unseal, "page .: 4 slots published, 1 sealed"),
        (drift, r"\(2, 0, 2\) pages referenced, pinned and cached, recorded 3, 0 and 1"),
        (forget_lease, "page .: 0 leases counted, 1 recorded"),
        (lease_of_foreign_pages, "these 1 are not those of the tree"),
        (swap_siblings, "children out of order"),
        (move_page, "page . points to another node"),
        (lose_candidate, "evictable but not queued"),
        (add_empty_tree, "has an empty tree"),
        (use_foreign_page, "these 1 are not those of the tree"),
    ],
)
def test_a_falsified_book_is_noticed(
    server: Server, falsify: Callable[[Server], None], sentence: str
) -> None:
    falsify(server)
    with pytest.raises(AuditError, match=sentence) as caught:
        server.cache.audit()
    assert caught.value.differences


@pytest.mark.parametrize(
    "falsify",
    [
        forget_listing,
        free_twice,
        unseal,
        drift,
        swap_siblings,
        move_page,
        lose_candidate,
        add_empty_tree,
        forget_lease,
    ],
)
def test_what_is_wrong_is_dropped_and_the_rest_serves_on(
    server: Server, falsify: Callable[[Server], None]
) -> None:
    """The books agree again, every page is accounted for, and what is found is right."""
    kept = server.lease(A, [1, 2, 3, 4], 60)
    falsify(server)
    with pytest.raises(CacheError, match="1 tables live"):
        server.cache.repair()
    for sequence in list(server.live):
        server.cache._tables.clear()
        server.live.remove(sequence)
    repair = server.cache.repair()
    assert repair.differences
    counts = server.cache.audit()
    assert counts.referenced == 0
    assert kept is not None
    assert counts.pinned == sum(len(each.pages) for each in server.cache.leases.of("a"))
    server.leased = {each.id: server.leased[each.id] for each in server.cache.leases.of("a")}
    server.check()
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [9, 9, 9, 9], [4] * 30):
        sequence = server.start(A, tokens)
        if sequence.table.num_tokens < len(tokens):
            server.run(sequence, len(tokens), tail=True)
        server.release(sequence)
        server.check()
    assert server.cache.repair() == Repair((), 0)


def test_a_sound_subtree_survives_its_neighbours_damage(server: Server) -> None:
    server.release(server.live[0])
    root = server.cache._forest.roots[A]
    damaged = root.children[0]
    damaged.children[0].first_page += 1
    repair = server.cache.repair()
    assert "misplaced" in repair.differences[0]
    assert repair.num_pages > 0
    assert server.cache.peek(A, as_array([1, 2, 3, 4])) == 0
    assert server.cache.peek(A, as_array([9, 9])) == 2
    server.check()

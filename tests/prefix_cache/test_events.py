"""A listener that applies every event knows exactly which pages are cached."""

import random

import pytest

from prefix_cache.cache import PrefixCache
from prefix_cache.events import EventKind, page_names
from prefix_cache.eviction import ExpectedReuse
from tests.prefix_cache.oracle import Server, as_array, namespace

A, B = namespace("a"), namespace("b")
P = 4


def names_in_tree(server: Server) -> set[bytes]:
    """Of every full page, from a walk."""
    found: set[bytes] = set()
    for name, root in server.cache.roots():
        stack = [(child, list[int]()) for child in root.children]
        while stack:
            node, before = stack.pop()
            tokens = before + node.tokens.tolist()
            found.update(page_names(name, as_array(tokens), P))
            stack += [(child, tokens) for child in node.children]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_listener_knows_what_is_cached(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(PrefixCache(14, P, ExpectedReuse(P)), P, 14)
    server.cache.events.watched = True
    known: set[bytes] = set()
    for _ in range(200):
        tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 36))]
        sequence = server.start(rng.choice((A, B)), tokens)
        if sequence.table.num_tokens < len(tokens):
            server.run(sequence, len(tokens), tail=rng.random() < 0.5)
        server.release(sequence)
        if rng.random() < 0.05:
            server.cache.flush()
        for event in server.cache.events.take():
            assert not event.parent or event.parent in known
            if event.kind is EventKind.STORED:
                assert not known & set(event.pages)
                known.update(event.pages)
            else:
                assert event.kind is EventKind.REMOVED
                assert known >= set(event.pages)
                known.difference_update(event.pages)
        assert known == names_in_tree(server)


def test_leases_are_told_with_their_pages() -> None:
    server = Server(PrefixCache(14, P), P, 14)
    sequence = server.start(A, [1] * 10)
    server.run(sequence, 10)
    server.cache.events.watched = True
    lease = server.lease(A, [1] * 10, 60)
    assert lease is not None
    server.cache.leases.release("a", lease.id)
    granted, ended = server.cache.events.take()
    names = tuple(page_names(A, as_array([1] * 8), P))
    assert (granted.kind, granted.pages, granted.lease_id) == (EventKind.LEASED, names, lease.id)
    assert (ended.kind, ended.pages, ended.lease_id) == (EventKind.LEASE_ENDED, names, lease.id)


def test_too_many_events_become_one_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_cache.events._MOST_PENDING", 3)
    server = Server(PrefixCache(14, P), P, 14)
    server.cache.events.watched = True
    for token in range(5):
        sequence = server.start(A, [token] * 5)
        server.run(sequence, 5)
    kinds = [event.kind for event in server.cache.events.take()]
    assert kinds == [EventKind.RESYNC, EventKind.STORED, EventKind.STORED]


def test_nobody_watching_nothing_is_collected() -> None:
    server = Server(PrefixCache(14, P), P, 14)
    sequence = server.start(A, [1] * 10)
    server.run(sequence, 10)
    assert server.cache.events.take() == []


def test_names_differ_by_every_field_and_token() -> None:
    one = page_names(A, as_array([1] * 8), P)
    assert len(set(one)) == 2
    assert set(one).isdisjoint(page_names(B, as_array([1] * 8), P))
    assert page_names(A, as_array([1] * 7 + [2]), P)[0] == one[0]
    assert page_names(A, as_array([1] * 7 + [2]), P)[1] != one[1]

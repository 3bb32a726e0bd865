"""Leases: what they hold, for how long, within which budget."""

import pytest

from prefix_cache.cache import CacheError, PrefixCache
from prefix_cache.lease import LeaseBudget
from tests.prefix_cache.oracle import Server, as_array, namespace

A, B = namespace("a"), namespace("b")
P = 2
PROMPT = [1, 1, 2, 2, 3, 3, 4]


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Server:
    """Twelve pages, of which a tenant may lease four and all together six; PROMPT is cached."""
    cache = PrefixCache(12, P, budget=LeaseBudget(4, 6), clock=clock)
    server = Server(cache, P, 12)
    keep(server, PROMPT)
    return server


def keep(server: Server, tokens: list[int], tenant: str = "a") -> None:
    sequence = server.start(namespace(tenant), tokens)
    server.run(sequence, len(tokens), tail=True)
    server.release(sequence)


def fill(server: Server) -> None:
    """Take all that is free or cached, and let it go again."""
    counts = server.cache.stats()
    num_tokens = (counts.free + counts.cached) * P
    sequence = server.start(namespace("filler"), [7] * num_tokens)
    assert server.plan(sequence, num_tokens)
    server.check()
    server.release(sequence)


def test_a_leased_prefix_stays_and_what_follows_it_may_go(server: Server) -> None:
    lease = server.lease(A, PROMPT[:5], 60)
    assert lease is not None
    assert (len(lease.pages), lease.num_tokens_asked) == (2, 5)
    assert server.cache.stats().pinned == 2
    fill(server)
    assert server.cache.peek(A, as_array(PROMPT)) == 4
    assert server.cache.flush() == 0
    assert server.cache.audit().pinned == 2


def test_a_lease_ends_when_its_time_has_passed(server: Server, clock: Clock) -> None:
    server.lease(A, PROMPT, 60)
    clock.now_s += 59
    assert server.cache.leases.expire() == 0
    clock.now_s += 1
    assert server.cache.leases.expire() == 1
    assert server.cache.audit().pinned == 0
    assert server.cache.flush() == 4


def test_a_hit_that_reaches_its_end_renews_it(server: Server, clock: Clock) -> None:
    lease = server.lease(A, PROMPT[:4], 60)
    assert lease is not None
    clock.now_s += 50
    server.release(server.start(A, PROMPT[:3]))
    assert (lease.expires_s, lease.num_hits) == (160, 0)
    server.release(server.start(A, PROMPT))
    assert (lease.expires_s, lease.num_hits) == (210, 1)
    clock.now_s += 59
    assert server.cache.leases.of("a") == [lease]


def test_a_budget_grants_in_part_from_the_beginning(server: Server) -> None:
    long = [5] * 12
    keep(server, long)
    lease = server.lease(A, long, 60)
    assert lease is not None
    assert (len(lease.pages), lease.num_tokens_asked) == (4, 12)
    assert server.lease(A, PROMPT, 60) is None
    keep(server, long, "b")
    other = server.lease(B, long, 60)
    assert other is not None
    assert len(other.pages) == 2, "all tenants together have six pages"
    server.check()


def test_pages_held_twice_count_once(server: Server) -> None:
    short, long = server.lease(A, PROMPT[:4], 60), server.lease(A, PROMPT[:6], 60)
    assert short is not None
    assert long is not None
    assert server.cache.stats().pinned == 3
    keep(server, [9, 9])
    assert server.lease(A, [9, 9], 60) is not None
    server.cache.leases.release("a", long.id)
    assert server.cache.audit().pinned == 3
    server.cache.leases.release("a", short.id)
    assert server.cache.audit().pinned == 1


def test_leases_their_pages_and_their_tenants_are_counted(server: Server, clock: Clock) -> None:
    assert server.cache.leases.count() == (0, 0, 0)
    for name, length in (("a", 2), ("a", 1), ("b", 1)):
        tokens = list(range(length * P))
        keep(server, tokens, name)
        assert server.cache.leases.grant(namespace(name), as_array(tokens), 300) is not None
    assert server.cache.leases.count() == (3, 3, 2)
    clock.now_s += 301
    server.cache.leases.expire()
    assert server.cache.leases.count() == (0, 0, 0)


def test_the_same_prefix_is_leased_once_and_prolonged(server: Server, clock: Clock) -> None:
    first = server.lease(A, PROMPT, 60)
    clock.now_s += 10
    second = server.lease(A, [*PROMPT[:6], 8, 8], 30)
    assert first is second
    assert second is not None
    assert (second.ttl_s, second.expires_s) == (60, 170)
    assert server.cache.stats().pinned == 3


def test_only_its_tenant_finds_a_lease(server: Server) -> None:
    lease = server.lease(A, PROMPT, 60)
    assert lease is not None
    assert server.cache.leases.of("b") == []
    assert server.cache.leases.extend("b", lease.id, 900) is None
    assert server.cache.leases.release("b", lease.id) is None
    assert server.cache.leases.extend("a", lease.id, 900) is lease
    assert lease.expires_s == 1000
    assert server.cache.leases.release("a", lease.id) is lease
    assert server.cache.leases.release("a", lease.id) is None


def test_what_runs_and_is_leased_is_referenced_then_pinned(server: Server) -> None:
    reader = server.start(A, PROMPT[:4])
    server.lease(A, PROMPT[:4], 60)
    counts = server.cache.audit()
    assert (counts.referenced, counts.pinned, counts.cached) == (2, 0, 2)
    server.release(reader)
    counts = server.cache.audit()
    assert (counts.referenced, counts.pinned, counts.cached) == (0, 2, 2)


def test_the_one_with_least_time_is_broken_first(server: Server) -> None:
    keep(server, [9, 9])
    server.lease(A, PROMPT[:4], 60)
    short = server.lease(A, [9, 9], 5)
    assert server.cache.leases.break_one() is short
    assert server.cache.leases.break_one() is not None
    assert server.cache.leases.break_one() is None
    assert server.cache.audit().pinned == 0


def test_pages_without_a_lease_are_not_let_go(server: Server) -> None:
    lease = server.lease(A, PROMPT, 60)
    assert lease is not None
    server.cache.leases.release("a", lease.id)
    with pytest.raises(CacheError, match="no lease to end"):
        server.cache._pool.unpin(lease.pages)

"""The face of the cache, one rule a test. `run` plans, writes and publishes as a server does."""

import pytest

from prefix_cache.cache import CacheError, PageCopy, PoolCounts, PrefixCache
from tests.prefix_cache.oracle import Sequence, Server, as_array, namespace

A = namespace("a")
P = 4
PROMPT = [*range(10, 20)]


@pytest.fixture
def server() -> Server:
    return Server(PrefixCache(12, P), P, 12)


def finished(server: Server, tokens: list[int]) -> list[int]:
    """Compute and finish a request; the pages it had."""
    sequence = server.start(A, tokens)
    server.run(sequence, len(tokens), tail=True)
    pages = list(sequence.table.pages)
    server.release(sequence)
    return pages


def test_a_full_hit_writes_nothing(server: Server) -> None:
    pages = finished(server, PROMPT)
    match = server.cache.match(A, as_array(PROMPT))
    assert (match.num_cached_tokens, match.table.pages) == (10, pages)
    before = server.cache.stats()
    assert server.cache.extend(match.table, 10) == ()
    assert match.table.pages == pages
    assert server.cache.stats() == before == PoolCounts(12, 9, 0, 3, 0)


@pytest.mark.parametrize("limit", [0, 3, 4, 9])
def test_a_match_keeps_to_its_limit(server: Server, limit: int) -> None:
    finished(server, PROMPT)
    table = server.start(A, PROMPT, limit).table
    assert (table.num_tokens, len(table.pages)) == (limit, -(-limit // P))
    server.check()


def test_an_empty_prompt_has_an_empty_table(server: Server) -> None:
    sequence = server.start(A, [])
    assert server.cache.extend(sequence.table, 0) == ()
    server.publish(sequence, 0, tail=True)
    server.release(sequence)
    assert server.cache.audit().free == 12


def test_the_first_to_go_on_takes_a_finished_tail_and_others_copy(server: Server) -> None:
    tail = finished(server, PROMPT)[2]
    first, second = server.start(A, [*PROMPT, 1]), server.start(A, [*PROMPT, 2])
    assert server.cache.extend(second.table, 11) == ()
    assert second.table.pages[2] == tail
    copies = server.cache.extend(first.table, 11)
    assert copies == (PageCopy(tail, first.table.pages[2]),)
    assert first.table.pages[2] != tail


def test_a_tail_taken_by_a_request_that_wrote_nothing_known_is_taken_again(server: Server) -> None:
    tail = finished(server, PROMPT)[2]
    for token in (1, 2):
        lost = server.start(A, [*PROMPT, token])
        assert server.plan(lost, 11)
        assert lost.table.pages[2] == tail
        server.compute()
        server.release(lost)
        server.check()
    assert server.cache.peek(A, as_array([*PROMPT, 2])) == 10


def test_a_match_that_ends_before_the_tail_copies(server: Server) -> None:
    pages = finished(server, PROMPT)
    sequence = server.start(A, [*PROMPT[:9], 1])
    server.run(sequence, 10, tail=True)
    assert sequence.table.pages[:2] == pages[:2]
    assert sequence.table.pages[2] != pages[2]
    server.check()
    assert server.cache.peek(A, as_array([*PROMPT[:9], 1])) == 10
    assert server.cache.peek(A, as_array(PROMPT)) == 10


def test_the_owner_fills_a_page_that_others_read(server: Server) -> None:
    owner = server.start(A, [*PROMPT, 1, 2, 3])
    server.run(owner, 10, tail=True)
    reader = server.start(A, [*PROMPT, 7])
    assert reader.table.pages == owner.table.pages
    server.run(owner, 13)
    server.run(reader, 11, tail=True)
    server.check()
    assert server.cache.peek(A, as_array([*PROMPT, 1, 2])) == 12
    assert server.cache.peek(A, as_array([*PROMPT, 7])) == 11


def test_both_sides_of_a_fork_write(server: Server) -> None:
    parent = server.start(A, [*PROMPT, 1])
    server.run(parent, 10)
    child = server.fork(parent)
    child.tokens.append(2)
    assert child.table.pages == parent.table.pages
    server.plan(parent, 11)
    server.plan(child, 11)
    assert parent.copies == ()
    assert len(child.copies) == 1
    for sequence in server.compute():
        server.publish(sequence, 11, tail=True)
    server.check()


def test_a_child_inherits_the_tail_of_a_parent_that_ended(server: Server) -> None:
    parent = server.start(A, PROMPT)
    server.run(parent, 10)
    child = server.fork(parent)
    child.tokens.append(2)
    server.release(parent)
    assert server.cache.extend(child.table, 11) == ()


def test_a_fork_while_a_copy_is_planned_is_refused(server: Server) -> None:
    finished(server, PROMPT)
    sequence = server.start(A, [*PROMPT[:9], 1])
    assert server.plan(sequence, 10)
    with pytest.raises(CacheError, match="copy"):
        server.cache.fork(sequence.table)


def test_twins_end_up_with_the_same_pages(server: Server) -> None:
    first, second = server.start(A, PROMPT), server.start(A, PROMPT)
    server.plan(first, 10)
    server.plan(second, 10)
    for sequence in server.compute():
        server.publish(sequence, 10)
    assert second.table.pages[:2] == first.table.pages[:2]
    assert second.table.pages[2] != first.table.pages[2]
    assert server.cache.audit().referenced == 4


def test_a_source_outlives_the_plan(server: Server) -> None:
    """Until the step is done the page a copy reads is not evicted, nor given to others."""
    finished(server, PROMPT)
    copying = server.start(A, [*PROMPT[:9], 1])
    assert server.plan(copying, 10)
    source = copying.copies[0].src
    greedy = server.start(A, [1] * 32)
    assert server.cache.extend(greedy.table, 4 * 9) is None
    assert server.plan(greedy, 32)
    assert source not in greedy.table.pages
    server.compute()
    server.publish(copying, 10)
    server.check()
    assert server.cache.stats().cached == 1


def test_extend_is_all_or_nothing(server: Server) -> None:
    finished(server, PROMPT)
    running = server.start(A, [1] * 20)
    server.run(running, 20)
    sequence = server.start(A, [*PROMPT[:6], *[2] * 60])
    before, pages = server.cache.stats(), list(sequence.table.pages)
    assert before == PoolCounts(total=12, free=4, cached=1, referenced=7, pinned=0)
    assert server.cache.extend(sequence.table, 4 * 7) is None
    assert (server.cache.audit(), sequence.table.pages) == (before, pages)
    copies = server.cache.extend(sequence.table, 4 * 6)
    assert copies is not None
    assert len(copies) == 1
    assert server.cache.audit().free == 0


@pytest.mark.parametrize("cached", [0, 1, 6, 41, 43])
def test_a_lone_request_grows_to_all_pages_but_one(server: Server, cached: int) -> None:
    tokens = [*range(100, 144)]
    finished(server, [*tokens[:cached], *[1] * (44 - cached)])
    sequence = server.start(A, tokens)
    assert sequence.table.num_tokens == cached
    server.run(sequence, 44, tail=True)
    server.check()


def test_publishing_is_limited_to_what_was_computed(server: Server) -> None:
    sequence = server.start(A, PROMPT)
    with pytest.raises(CacheError, match="writable"):
        server.publish(sequence, 1)
    server.run(sequence, 6)
    with pytest.raises(CacheError, match="writable"):
        server.publish(sequence, 5)
    with pytest.raises(CacheError, match="given"):
        server.cache.publish(sequence.table, as_array(PROMPT[:7]), 8)
    assert server.cache.peek(A, as_array(PROMPT)) == 4
    server.check()


def test_a_released_table_is_not_used_again(server: Server) -> None:
    table = server.cache.match(A, as_array(PROMPT)).table
    server.cache.release(table)
    with pytest.raises(CacheError):
        server.cache.release(table)
    with pytest.raises(CacheError):
        server.cache.extend(table, 1)
    with pytest.raises(CacheError):
        server.cache.publish(table, as_array(PROMPT), 0)
    with pytest.raises(CacheError):
        server.cache.fork(table)


def test_flush_spares_what_is_referenced(server: Server) -> None:
    finished(server, [1, 2, 3, 4, 5])
    running = server.start(A, PROMPT)
    server.run(running, 10)
    assert server.cache.flush() == 2
    assert server.cache.audit() == PoolCounts(12, 9, 0, 3, 0)
    server.release(running)
    assert server.cache.flush() == 2
    assert server.cache.audit().free == 12


@pytest.mark.parametrize("last", range(10))
def test_an_abort_at_any_point_leaks_nothing_and_publishes_nothing(
    server: Server, last: int
) -> None:
    """sgl-project/sglang#12693 and PR #28374: what was not published before is not found after."""
    finished(server, PROMPT[:3])
    sequence = server.start(A, PROMPT)
    num_published = 3
    for point in range(last):
        end = min(4 * (point // 3 + 1), 10)
        if point % 3 == 0:
            assert server.plan(sequence, end)
        elif point % 3 == 1:
            server.compute()
        else:
            server.publish(sequence, end)
            num_published = max(3, end - end % P)
    server.release(sequence)
    server.check()
    assert server.cache.stats().referenced == 0
    assert server.cache.peek(A, as_array(PROMPT)) == num_published


def test_shared_prefixes_are_counted_once(server: Server) -> None:
    """sgl-project/sglang#35270: 256 requests over one prefix, some at a time, then idle."""
    live: list[Sequence] = []
    for number in range(256):
        sequence = server.start(A, [*PROMPT, number])
        if not server.plan(sequence, 11):
            server.release(live.pop(0))
            assert server.plan(sequence, 11)
        server.compute()
        server.publish(sequence, 11, tail=True)
        live.append(sequence)
        if len(live) > 6:
            server.release(live.pop(0))
        counts = server.cache.audit()
        assert counts.referenced == len({page for item in live for page in item.table.pages})
    for sequence in live:
        server.release(sequence)
    counts = server.cache.audit()
    assert (counts.referenced, counts.free + counts.cached) == (0, 12)

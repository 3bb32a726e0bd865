"""Who is cut first, and what is never cut."""

from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse, LeastRecentlyUsed
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


class LongTurnsStay(LeastRecentlyUsed):
    """Two kinds, and age does not count: what a long turn left is worth more."""

    num_kinds = 2

    def kind_of(self, turns: int, num_new_pages: int) -> int:
        return int(num_new_pages > 1)

    def kind_at_end(self, kind: int) -> int:
        return kind

    def worth(self, kind: int, age: int) -> float:
        return kind


def test_another_policy_can_be_given() -> None:
    server = Server(PrefixCache(6, P, LongTurnsStay()), P, 6)
    for tokens in ([1, 1, 1, 1], [2, 2], [3, 3]):
        finished(server, tokens)
    occupy(server, 2 + 1)
    assert lengths(server, [1, 1, 1, 1], [2, 2], [3, 3]) == [4, 0, 2]


def test_what_is_used_again_changes_its_kind() -> None:
    server = Server(PrefixCache(6, P, LongTurnsStay()), P, 6)
    finished(server, [1, 1])
    finished(server, [2, 2])
    finished(server, [1, 1, 1, 1, 1, 1])
    occupy(server, 2 + 1)
    assert lengths(server, [1, 1, 1, 1, 1, 1], [2, 2]) == [6, 0]


def test_expected_reuse_keeps_sessions_that_come_back() -> None:
    """Nine of ten prompts are never seen again; sessions return each time. LRU forgets them
    between their turns, as more single prompts come in between than there are pages for."""
    shares = {}
    for policy in (LeastRecentlyUsed(), ExpectedReuse(512)):
        cache = PrefixCache(120, 1, policy)
        fresh = iter(range(1, 1 << 20))
        sessions = [[next(fresh) for _ in range(4)] for _ in range(6)]
        num_hits = 0
        for turn in range(400):
            session = sessions[turn % 6]
            session += [next(fresh)]
            del session[4:-12]
            for tokens in [session, *([next(fresh) for _ in range(8)] for _ in range(9))]:
                match = cache.match(A, as_array(tokens))
                num_hits += match.num_cached_tokens
                assert cache.extend(match.table, len(tokens)) is not None
                cache.publish(match.table, as_array(tokens), len(tokens))
                cache.release(match.table)
        cache.audit()
        shares[type(policy).__name__] = num_hits
    assert shares["ExpectedReuse"] > 2 * shares["LeastRecentlyUsed"]

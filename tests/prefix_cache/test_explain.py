"""Why a prompt was not found: each reason, and what is told with it."""

from dataclasses import replace

from prefix_cache.cache import PrefixCache
from prefix_cache.explain import WINDOW, MissReason
from tests.prefix_cache.oracle import Server, as_array, namespace

A = namespace("a")
P = 4


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def a_server(num_pages: int = 40, clock: Clock | None = None) -> Server:
    return Server(PrefixCache(num_pages, P, clock=clock or Clock()), P, num_pages)


def keep(server: Server, tokens: list[int], *, tenant: str = "a", salt: str = "") -> None:
    name = replace(namespace(tenant), salt=salt)
    sequence = server.start(name, tokens)
    server.run(sequence, len(tokens), tail=True)
    server.release(sequence)


def reason(server: Server, tokens: list[int]) -> tuple[MissReason | None, int]:
    why = server.cache.explain(A, as_array(tokens))
    match = server.cache.match(A, as_array(tokens))
    assert (match.explanation.reason, match.num_cached_tokens) == (why.reason, why.num_matched)
    server.cache.release(match.table)
    return why.reason, why.num_matched


def test_a_prompt_that_nothing_begins_is_cold_or_too_short() -> None:
    server = a_server()
    assert reason(server, [1] * 9) == (MissReason.COLD, 0)
    assert reason(server, [1] * 3) == (MissReason.TOO_SHORT, 0)
    keep(server, [2] * 9)
    assert reason(server, [1] * 9) == (MissReason.COLD, 0)


def test_all_found_or_all_there_is_found_is_no_miss() -> None:
    server = a_server()
    keep(server, [1] * 9)
    assert reason(server, [1] * 9) == (None, 9)
    assert reason(server, [1] * 10) == (None, 9)
    assert reason(server, [1] * 20) == (None, 9)


def test_a_divergence_shows_what_is_stored_from_there_on() -> None:
    server = a_server()
    stored = list(range(1, 30))
    keep(server, stored)
    for position in (1, 4, 6, 8):
        asked = [*stored[:position], 99, *stored[position + 1 :]]
        assert reason(server, asked) == (MissReason.DIVERGED, position)
        why = server.cache.explain(A, as_array(asked))
        assert why.stored.tolist() == stored[position : position + WINDOW]


def test_between_branches_the_last_used_one_is_shown() -> None:
    server = a_server()
    keep(server, [1, 1, 1, 1, 2, 2])
    keep(server, [1, 1, 1, 1, 3, 3])
    keep(server, [1, 1, 1, 1, 2, 2])
    why = server.cache.explain(A, as_array([1, 1, 1, 1, 4, 4]))
    assert (why.reason, why.stored.tolist()) == (MissReason.DIVERGED, [2, 2])


def test_an_evicted_prefix_says_how_long_ago() -> None:
    clock = Clock()
    server = a_server(8, clock)
    old = list(range(1, 13))
    keep(server, old)
    keep(server, [50] * 24)
    clock.now_s += 30
    assert reason(server, old) == (MissReason.EVICTED, 8)
    assert server.cache.explain(A, as_array(old)).evicted_ago_s == 30
    assert reason(server, [*old[:8], 9, 9, 9, 9, 9]) == (None, 8), "this was never there"


def test_a_prefix_evicted_to_its_first_page_is_known_too() -> None:
    server = a_server(6)
    keep(server, [1] * 12)
    keep(server, [50] * 24)
    assert reason(server, [1] * 12) == (MissReason.EVICTED, 0)


def test_a_salt_is_told_that_it_keeps_the_tenants_own_prefix_away() -> None:
    server = a_server()
    keep(server, [1] * 9)
    salted = replace(A, salt="s")
    why = server.cache.explain(salted, as_array([1] * 9))
    assert (why.reason, why.num_matched, len(why.stored)) == (MissReason.NAMESPACE, 0, 0)


def test_of_other_tenants_and_salts_nothing_is_told() -> None:
    server = a_server()
    keep(server, [1] * 9, tenant="b")
    keep(server, [1] * 9, salt="s")
    assert reason(server, [1] * 9) == (MissReason.COLD, 0)
    other_salt = server.cache.explain(replace(A, salt="t"), as_array([1] * 9))
    assert other_salt.reason is MissReason.COLD
    keep(server, [1] * 4 + [2] * 5)
    why = server.cache.explain(A, as_array([1] * 4 + [3] * 5))
    assert (why.reason, why.stored.tolist()) == (MissReason.DIVERGED, [2] * 5)

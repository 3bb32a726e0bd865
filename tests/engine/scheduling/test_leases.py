"""Leases in the engine: granted when the prompt is computed, and never in the way of all work."""

from engine.types import ExplainPrompt, KeepPrefix, LeaseInfo, ListLeases, ReleaseLease, pack_tokens
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core


def leases(run: Driver) -> tuple[LeaseInfo, ...]:
    answer = run.core.ask_cache(ListLeases("public"))
    assert isinstance(answer, tuple)
    return answer


def test_a_lease_is_told_with_the_end_and_holds_whole_pages() -> None:
    run = Driver(tiny_core(num_pages=64))
    request_id = run.add(prompt(1, 75), 4, keep=(KeepPrefix(40, 60.0), KeepPrefix(-1, 30.0)))
    run.run()
    end = run.answers[request_id].finished
    assert end is not None
    assert [(each.num_tokens, each.num_tokens_asked) for each in end.leases] == [(32, 40), (64, 75)]
    assert run.core.stats().pool.pinned == 4
    run.core.flush()
    assert run.core.audit().pinned == 4
    for lease in leases(run):
        assert run.core.ask_cache(ReleaseLease("public", lease.id)) != ()
    assert run.core.audit().pinned == 0
    run.assert_idle()


def test_what_the_budget_does_not_allow_is_told() -> None:
    run = Driver(tiny_core(num_pages=16, max_context=16 * PAGE))
    request_id = run.add(prompt(1, 10 * PAGE), 2, keep=(KeepPrefix(-1, 60.0),))
    run.run()
    end = run.answers[request_id].finished
    assert end is not None
    assert end.leases[0].num_tokens == 4 * PAGE, "a quarter of the pool"


def test_leases_give_way_to_a_request_that_could_never_run_beside_them() -> None:
    run = Driver(tiny_core(num_pages=12, max_context=12 * PAGE))
    for seed in range(2):
        run.add(prompt(seed, 3 * PAGE), 0, keep=(KeepPrefix(-1, 600.0),), tenant=f"t{seed}")
        run.run()
    assert run.core.stats().pool.pinned == 6
    big = prompt(9, 6 * PAGE)
    request_id = run.add(big, 20)
    run.run()
    answer = run.answers[request_id]
    assert answer.tokens == Driver(tiny_core()).answer(big, 20).tokens
    assert run.core.stats().pool.pinned == 3, "one was enough"
    run.assert_idle()


def test_an_explanation_counts_no_use_and_computes_nothing() -> None:
    run = Driver(tiny_core())
    tokens = prompt(2, 50)
    run.answer(tokens, 2)
    before = run.core.stats()
    report = run.core.ask_cache(ExplainPrompt("public", "", pack_tokens([*tokens[:20], 5, 5])))
    assert not isinstance(report, tuple)
    assert (report.num_cached_tokens, report.reason) == (20, "diverged")
    assert report.stored == pack_tokens(tokens[20:28])
    after = run.core.stats()
    assert (after.pool, after.num_steps) == (before.pool, before.num_steps)
    other = run.core.ask_cache(ExplainPrompt("other", "", pack_tokens(tokens)))
    assert not isinstance(other, tuple)
    assert (other.num_cached_tokens, other.reason, other.stored) == (0, "cold", b"")


def test_what_a_leader_computed_is_told_as_in_flight() -> None:
    run = Driver(tiny_core(token_budget=32))
    tokens = prompt(3, 120)
    ids = [run.add(tokens + prompt(n, 5), 2) for n in range(3)]
    run.run()
    reports = [started.cache for i in ids if (started := run.answers[i].started)]
    followed = [report.num_in_flight_tokens > 100 for report in reports if report]
    assert followed == [False, True, True]

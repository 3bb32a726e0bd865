"""The rules of pages and slots under any order of events, with an audit after each."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse, LeastRecentlyUsed
from prefix_cache.explain import MissReason
from prefix_cache.key import Namespace
from prefix_cache.lease import LeaseBudget
from tests.prefix_cache.oracle import Sequence, Server, as_array, namespace

Runs = list[tuple[int, int]]
MAX_LIVE = 6
NAMESPACES = (namespace("a"), namespace("b"))
names = st.sampled_from(NAMESPACES)
picks = st.integers(min_value=0, max_value=MAX_LIVE - 1)
# Few distinct tokens, so that prefixes collide; runs of one token reach far into large pages.
runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=4)


def tokens_of(drawn: Runs) -> list[int]:
    return [token for token, count in drawn for _ in range(count)]


class CacheMachine(RuleBasedStateMachine):
    """Requests that match, compute, fork, fail, finish and vanish, against the oracle."""

    page_size = 4
    num_pages = 9
    evicts = True
    learns = False

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        # A lone request must be able to have all but a page, so that nothing here is hopeless.
        budget = LeaseBudget(self.num_pages // 3, self.num_pages // 2)
        policy = ExpectedReuse(self.page_size) if self.learns else LeastRecentlyUsed()
        cache = PrefixCache(
            self.num_pages, self.page_size, policy, budget=budget, clock=lambda: self.now_s
        )
        self.server = Server(cache, self.page_size, self.num_pages)

    def pick(self, index: int) -> Sequence | None:
        """A live sequence without a planned step, None if there is none."""
        idle = [sequence for sequence in self.server.live if not sequence.planned]
        return idle[index % len(idle)] if idle else None

    @rule(name=names, prompt=runs, limit=st.none() | st.integers(0, 20), count=st.integers(-9, 40))
    def start(self, name: Namespace, prompt: Runs, limit: int | None, count: int) -> None:
        """Match a prompt, and plan `count` tokens of it if that is positive."""
        if len(self.server.live) == MAX_LIVE:
            self.server.release(self.server.live[0])
        tokens = tokens_of(prompt)
        peeked = self.server.cache.peek(name, as_array(tokens))
        sequence = self.server.start(name, tokens, limit)
        found = sequence.table.num_tokens
        stored = self.server.longest_published(name, tokens)
        why = self.server.cache.explain(name, as_array(tokens))
        assert why.num_matched == peeked
        if why.reason is MissReason.DIVERGED:
            assert why.stored[0] != tokens[peeked]
            told = tokens[:peeked] + why.stored.tolist()
            assert self.server.longest_published(name, told) == len(told)
        assert found == min(peeked, len(tokens) if limit is None else limit)
        assert peeked == stored or (self.evicts and peeked < stored)
        assert len(sequence.table.pages) == -(-found // self.page_size)
        if count > 0 and found < len(tokens):
            self._extend(sequence, count)

    @rule(index=picks, count=st.integers(1, 20), generated=runs)
    def plan(self, index: int, count: int, generated: Runs) -> None:
        if sequence := self.pick(index):
            if sequence.table.num_tokens == len(sequence.tokens):
                sequence.tokens += tokens_of(generated)
            self._extend(sequence, count)

    def _extend(self, sequence: Sequence, count: int) -> None:
        table = sequence.table
        target = min(len(sequence.tokens), table.num_tokens + count)
        before = self.server.cache.stats()
        if not self.server.plan(sequence, target):
            assert self.server.cache.stats() == before
            num_missing = -(-target // self.page_size) - len(table.pages)
            assert num_missing + 1 > before.free + before.cached
            self.server.release(sequence)

    @rule(num_rejected=st.integers(0, 3), tail=st.booleans())
    def step(self, num_rejected: int, tail: bool) -> None:
        targets = [sequence.planned for sequence in self.server.live if sequence.planned]
        for sequence, target in zip(self.server.compute(), targets, strict=True):
            accepted = max(sequence.table.num_tokens, target - max(num_rejected, 0))
            if accepted < target:
                del sequence.tokens[accepted:]
            self.server.publish(sequence, accepted, tail=tail)

    @rule()
    def failed_step(self) -> None:
        for sequence in self.server.compute():
            self.server.release(sequence)

    @rule(index=picks)
    def publish_tail(self, index: int) -> None:
        if sequence := self.pick(index):
            self.server.publish(sequence, sequence.table.num_tokens, tail=True)

    @rule(index=picks)
    def fork(self, index: int) -> None:
        sequence = self.pick(index)
        if sequence and len(self.server.live) < MAX_LIVE:
            child = self.server.fork(sequence)
            assert child.table.num_tokens == sequence.table.num_tokens

    @rule(index=picks)
    def finish(self, index: int) -> None:
        if self.pick(index) is None:
            self.step(0, tail=False)
        if sequence := self.pick(index):
            self.server.publish(sequence, sequence.table.num_tokens, tail=True)
            self.server.release(sequence)

    @rule(index=picks)
    def abort(self, index: int) -> None:
        if self.server.live:
            self.server.release(self.server.live[index % len(self.server.live)])

    @rule(name=names, prompt=runs, ttl_s=st.integers(1, 5))
    def lease(self, name: Namespace, prompt: Runs, ttl_s: int) -> None:
        tokens = tokens_of(prompt)
        budget = self.server.cache.leases.book._budget
        found = self.server.cache.peek(name, as_array(tokens))
        lease = self.server.lease(name, tokens, ttl_s)
        mine = {
            page
            for each in self.server.cache.leases.of(name.tenant)
            for page in each.pages.tolist()
        }
        assert len(mine) <= budget.tenant_pages
        assert self.server.cache.leases.book.num_pages <= budget.total_pages
        assert lease is None or len(lease.pages) <= found // self.page_size
        if lease is not None and found == len(tokens) and len(mine) < budget.tenant_pages:
            full = self.server.cache.leases.book.num_pages == budget.total_pages
            assert full or len(lease.pages) == found // self.page_size

    @rule(name=names, which=picks)
    def end_lease(self, name: Namespace, which: int) -> None:
        leases = self.server.cache.leases.of(name.tenant)
        if leases:
            lease = leases[which % len(leases)]
            assert self.server.cache.leases.release("nobody", lease.id) is None
            assert self.server.cache.leases.release(name.tenant, lease.id) is lease

    @rule(passed_s=st.integers(1, 3))
    def time_passes(self, passed_s: int) -> None:
        self.now_s += passed_s
        due = sum(each.expires_s <= self.now_s for each in self.server.cache.leases.book)
        assert self.server.cache.leases.expire() == due

    # Where each match must be exact, the oracle does not know what outlives a flush.
    @precondition(
        lambda self: self.evicts or not (self.server.live or self.server.cache.stats().pinned)
    )
    @rule()
    def flush(self) -> None:
        before = self.server.cache.stats()
        assert self.server.cache.flush() == before.cached
        after = self.server.cache.stats()
        assert (after.cached, after.referenced) == (0, before.referenced)
        assert after.pinned == before.pinned
        if not self.server.live and not after.pinned:
            self.server.published.clear()

    @invariant()
    def books_and_memory_agree(self) -> None:
        self.server.check()

    def teardown(self) -> None:
        for sequence in list(self.server.live):
            self.server.release(sequence)
        self.server.check()
        while self.server.cache.leases.break_one():
            self.server.check()
        self.server.cache.flush()
        assert self.server.cache.audit().free == self.num_pages


class PageOfOneMachine(CacheMachine):
    page_size = 1
    num_pages = 14


class LargePageMachine(CacheMachine):
    page_size = 16
    num_pages = 7


class LearningMachine(CacheMachine):
    """The policy of the server, with its many kinds."""

    num_pages = 12
    learns = True


class RoomyMachine(CacheMachine):
    """Nothing is ever evicted, so each match must be the longest published prefix exactly."""

    num_pages = 600
    evicts = False


_SETTINGS = settings(max_examples=40, stateful_step_count=40)

TestSmallPages = CacheMachine.TestCase
TestPageOfOne = PageOfOneMachine.TestCase
TestLargePages = LargePageMachine.TestCase
TestRoomy = RoomyMachine.TestCase
TestLearning = LearningMachine.TestCase
TestSmallPages.settings = TestPageOfOne.settings = TestLearning.settings = _SETTINGS
TestLargePages.settings = TestRoomy.settings = _SETTINGS


def walk(machine: CacheMachine, seed: int, num_events: int) -> None:
    """The machine's rules in a random order with weights, to reach states far from the start."""
    rng = random.Random(seed)

    def draw() -> Runs:
        return [(rng.randint(0, 1), rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]

    def start() -> None:
        name = NAMESPACES[rng.random() < 0.1]
        machine.start(name, draw(), rng.choice([None, None, 9]), rng.randint(-30, 40))

    def pick() -> int:
        return rng.randrange(MAX_LIVE)

    events: list[tuple[int, Callable[[], None]]] = [
        (6, start),
        (9, lambda: machine.plan(pick(), rng.randint(1, 20), draw())),
        (5, lambda: machine.step(rng.randint(-6, 3), rng.random() < 0.3)),
        (1, machine.failed_step),
        (2, lambda: machine.publish_tail(pick())),
        (2, lambda: machine.fork(pick())),
        (3, lambda: machine.finish(pick())),
        (1, lambda: machine.abort(pick())),
        (2, lambda: machine.lease(NAMESPACES[rng.random() < 0.2], draw(), rng.randint(1, 5))),
        (1, lambda: machine.end_lease(NAMESPACES[0], pick())),
        (2, lambda: machine.time_passes(1)),
    ]
    if machine.evicts:
        events.append((1, machine.flush))
    weights = [weight for weight, _ in events]
    for _, event in rng.choices(events, weights, k=num_events):
        event()
        machine.books_and_memory_agree()
    machine.teardown()


@pytest.mark.parametrize(
    "machine", [CacheMachine, PageOfOneMachine, LargePageMachine, LearningMachine, RoomyMachine]
)
def test_long_walks(machine: type[CacheMachine]) -> None:
    for seed in range(16):
        walk(machine(), seed, 250)


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine", [CacheMachine, PageOfOneMachine, LargePageMachine, LearningMachine, RoomyMachine]
)
def test_many_long_walks(machine: type[CacheMachine]) -> None:
    for seed in range(1000, 1150):
        walk(machine(), seed, 300)


def test_the_oracle_sees_a_difference() -> None:
    """Guards the guard: a slot written with other tokens than the books say is noticed."""
    server = Server(PrefixCache(4, 4), 4, 4)
    sequence = server.start(NAMESPACES[0], [1, 2, 3, 4, 5])
    server.run(sequence, 5)
    server.check()
    server.slots[sequence.table.pages[0]][2] = (NAMESPACES[0], 1, 2, 9)
    with pytest.raises(AssertionError):
        server.check()

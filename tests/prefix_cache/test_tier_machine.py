"""The second tier under any order of events: prompts, evictions to disk, restores that take their
time, leases, damage, flushes, restarts from a snapshot; the books are audited after each."""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefix_cache import snapshot
from prefix_cache.key import Namespace
from prefix_cache.restore import Restore
from prefix_cache.snapshot import Identity
from tests.prefix_cache.oracle import as_array
from tests.prefix_cache.test_tiers import PAGE_BYTES, A, B, Machine, P

Runs = list[tuple[int, int]]
IDENTITY = Identity("m", "exact", "f16", P, PAGE_BYTES)
names = st.sampled_from((A, B))
picks = st.integers(0, 7)
# Runs of one token, mostly whole pages of it, so that prompts share pages and part at their ends.
runs = st.lists(st.tuples(st.integers(0, 1), st.sampled_from((1, 4, 4, 4, 8))), min_size=1)


def tokens_of(drawn: Runs) -> list[int]:
    return [token for token, count in drawn[:7] for _ in range(count)]


class TierMachine(RuleBasedStateMachine):
    """`Machine.keep` compares what is found with what was computed for these very tokens."""

    num_pages = 16
    num_slots = 20

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.machine = Machine(self.num_pages, self.num_slots, folder=self.folder)
        self.open: list[tuple[Restore, int]] = []

    @rule(name=names, prompt=runs)
    def serve(self, name: Namespace, prompt: Runs) -> None:
        self.machine.keep(name, tokens_of(prompt))

    @rule(name=names, prompt=runs)
    def begin(self, name: Namespace, prompt: Runs) -> None:
        restore = self.machine.begin(name, tokens_of(prompt))
        if restore is not None and all(restore is not each for each, _ in self.open):
            self.open.append((restore, 0))

    @rule(which=picks)
    def read_a_page(self, which: int) -> None:
        if not self.open:
            return
        restore, num_good = self.open.pop(which % len(self.open))
        data = self.machine.tier.read(restore.pages[num_good])
        if data is not None:
            self.machine.import_page(restore.target(num_good), data)
            num_good += 1
        if data is None or num_good == len(restore.pages):
            self.machine.restores.end(restore, num_good, damaged=data is None)
            return
        self.open.append((restore, num_good))

    @rule(which=picks)
    def give_up(self, which: int) -> None:
        if self.open:
            restore, num_good = self.open.pop(which % len(self.open))
            self.machine.restores.end(restore, num_good)

    @rule(which=st.integers(0, 19))
    def damage(self, which: int) -> None:
        self.machine.tier.file.memory[which % self.num_slots * PAGE_BYTES] ^= 1

    @rule(name=names, prompt=runs)
    def lease(self, name: Namespace, prompt: Runs) -> None:
        self.machine.cache.leases.grant(name, as_array(tokens_of(prompt)), 60)

    @rule(name=names)
    def end_lease(self, name: Namespace) -> None:
        for lease in self.machine.cache.leases.of(name.tenant)[:1]:
            self.machine.cache.leases.release(name.tenant, lease.id)

    @rule()
    def flush(self) -> None:
        self.machine.cache.flush()

    @rule(num_pages=st.sampled_from((8, 16, 24)))
    def restart(self, num_pages: int) -> None:
        """What is under way is given up; another server takes over what is there, on disk too."""
        while self.open:
            self.give_up(0)
        old = self.machine
        snapshot.save(self.folder, IDENTITY, old.cache, old.export_page, old.tier)
        new = Machine(num_pages, self.num_slots, folder=self.folder, published=old.published)
        told = snapshot.load(self.folder, IDENTITY, new.cache, new.import_page, new.tier)
        assert told.refused == "" or "had no room" in told.refused
        assert len(new.tier) <= len(old.tier)
        self.machine = new

    @invariant()
    def books_agree(self) -> None:
        counts = self.machine.cache.audit()
        assert self.open or counts.referenced == 0

    def teardown(self) -> None:
        while self.open:
            self.give_up(0)
        while self.machine.cache.leases.break_one():
            self.machine.cache.audit()
        self.machine.cache.flush()
        assert self.machine.cache.audit().free == self.machine.num_pages
        assert len(self.machine.tier) == 0
        shutil.rmtree(self.folder)


class SmallDiskMachine(TierMachine):
    num_slots = 3


TestTiers = TierMachine.TestCase
TestSmallDisk = SmallDiskMachine.TestCase
TestTiers.settings = settings(max_examples=25, stateful_step_count=40)
TestSmallDisk.settings = TestTiers.settings


def walk(machine: TierMachine, seed: int, num_events: int) -> int:
    """The rules in a random order with weights; how many pages came back from disk."""
    rng = random.Random(seed)

    def draw() -> Runs:
        return [(rng.randint(0, 1), rng.choice((1, 4, 4, 4, 8))) for _ in range(rng.randint(1, 7))]

    def name() -> Namespace:
        return A if rng.random() < 0.8 else B

    events: list[tuple[float, Callable[[], None]]] = [
        (8, lambda: machine.serve(name(), draw())),
        (6, lambda: machine.begin(name(), draw())),
        (16, lambda: machine.read_a_page(rng.randrange(8))),
        (1, lambda: machine.give_up(rng.randrange(8))),
        (0.3, lambda: machine.damage(rng.randrange(20))),
        (1, lambda: machine.lease(name(), draw())),
        (1, lambda: machine.end_lease(name())),
        (0.1, machine.flush),
        (0.3, lambda: machine.restart(rng.choice((8, 16, 24)))),
    ]
    num_restored = 0
    for _, event in rng.choices(events, [weight for weight, _ in events], k=num_events):
        before = machine.machine
        event()
        machine.books_agree()
        if machine.machine is not before:
            num_restored += before.tier.num_restored
    num_restored += machine.machine.tier.num_restored
    machine.teardown()
    return num_restored


@pytest.mark.parametrize("machine", [TierMachine, SmallDiskMachine])
def test_long_walks(machine: type[TierMachine]) -> None:
    assert sum(walk(machine(), seed, 300) for seed in range(4)) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [TierMachine, SmallDiskMachine])
def test_100_000_events(machine: type[TierMachine]) -> None:
    assert sum(walk(machine(), seed, 1000) for seed in range(1000, 1050)) > 1000

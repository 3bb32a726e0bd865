"""The second tier: what is evicted comes back as it was, through its own prefix only."""

import errno
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from prefix_cache import snapshot
from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse
from prefix_cache.key import Namespace
from prefix_cache.radix_tree import Root
from prefix_cache.restore import Restore, Restores
from prefix_cache.snapshot import Identity, Restored
from prefix_cache.tiers import DiskTier
from tests.prefix_cache.oracle import as_array, common_length, namespace

P, PAGE_BYTES = 4, 96
A, B = namespace("a"), namespace("b")


@dataclass
class Machine:
    """A cache with a disk, and what its device pages hold: the prefix they were computed for."""

    num_pages: int = 12
    num_slots: int = 30
    folder: Path | None = None
    pages: dict[int, bytes] = field(default_factory=dict)
    published: list[tuple[Namespace, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.num_pages, P, ExpectedReuse(P))
        self.tier = DiskTier(
            self,
            num_device_pages=self.num_pages,
            page_size=P,
            page_bytes=PAGE_BYTES,
            num_bytes=self.num_slots * PAGE_BYTES,
            folder=self.folder,
            keep=self.folder is not None,
        )
        self.cache.attach(self.tier)
        self.restores = Restores(self.cache, self.tier)

    def export_page(self, page: int) -> bytes:
        return self.pages[page]

    def import_page(self, page: int, data: bytes) -> None:
        self.pages[page] = data

    def keep(self, name: Namespace, tokens: list[int]) -> int:
        """Serve a prompt; how many tokens of it were there before it, and right."""
        restored = self.restore(name, tokens)
        match = self.cache.match(name, as_array(tokens))
        found = match.num_cached_tokens
        assert found >= restored
        for index in range(found // P):
            assert self.pages[match.table.pages[index]] == contents(name, tokens[: (index + 1) * P])
        assert found <= max(
            (common_length(tokens, each) for n, each in self.published if n == name), default=0
        )
        if found < len(tokens) and self.cache.extend(match.table, len(tokens)) is not None:
            for index in range(found // P, len(match.table.pages)):
                end = (index + 1) * P
                self.pages[match.table.pages[index]] = contents(name, tokens[:end])
            self.cache.publish(match.table, as_array(tokens), len(tokens))
            self.published.append((name, tokens))
        self.cache.release(match.table)
        self.cache.audit()
        return found

    def restore(self, name: Namespace, tokens: list[int], ms_per_token: float = 1e9) -> int:
        """Bring back what is on disk, as an engine does between two steps."""
        under_way = list(self.restores.open)
        restore = self.begin(name, tokens, ms_per_token)
        if restore is None or restore in under_way:
            return 0
        self.read_to_end(restore)
        return restore.num_tokens

    def begin(
        self, name: Namespace, tokens: list[int], ms_per_token: float = 1e9
    ) -> Restore | None:
        return self.restores.begin(name, as_array(tokens), lambda past, count: count * ms_per_token)

    def read_to_end(self, restore: Restore) -> None:
        num_good = 0
        for page in restore.pages:
            data = self.tier.read(page)
            if data is None:
                break
            self.import_page(restore.target(num_good), data)
            num_good += 1
        damaged = num_good < len(restore.pages) and self.tier.is_current(restore.pages)
        self.restores.end(restore, num_good, damaged=damaged)


def contents(name: Namespace, tokens: list[int]) -> bytes:
    told = repr((name.tenant, name.salt, hash(tuple(tokens)))).encode()
    return told.ljust(PAGE_BYTES)[:PAGE_BYTES]


ONE, TWO = list(range(1, 33)), list(range(101, 133))


def test_what_was_evicted_comes_back() -> None:
    machine = Machine()
    assert machine.keep(A, ONE) == 0
    machine.keep(A, TWO)
    assert machine.cache.peek(A, as_array(ONE)) == 16
    assert len(machine.tier) == 4
    assert machine.restore(A, ONE) == 16
    assert machine.cache.peek(A, as_array(ONE)) == 32
    assert machine.cache.peek(A, as_array(TWO)) == 16, "its end went out for it"
    assert len(machine.tier) == 4
    assert machine.keep(A, TWO) == 32
    machine.cache.audit()


def test_where_the_file_system_is_full_the_tier_keeps_what_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the first page too many ended the process by SIGBUS."""

    def reserve(file: int, offset: int, num_bytes: int) -> None:
        if offset >= 8 * PAGE_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    machine, rng = Machine(), random.Random(6)
    prompts = [[rng.randrange(99) for _ in range(32)] for _ in range(20)]
    for tokens in prompts * 3:
        machine.keep(A, tokens)
    assert 0 < len(machine.tier) <= 8
    assert [record.message for record in caplog.records] == [
        "the second tier keeps only what fits: No space left on device"
    ]
    machine.cache.flush()
    assert not len(machine.tier)
    machine.cache.audit()


def test_only_the_own_prefix_leads_to_a_page() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    for name in (B, replace(A, salt="s")):
        assert machine.restore(name, ONE) == 0
    assert machine.restore(A, [9, *ONE[1:]]) == 0
    assert machine.restore(A, [*ONE[:20], 9, *ONE[21:]]) == 4
    assert machine.cache.peek(A, as_array(ONE)) == 20


def test_what_is_cheaper_to_compute_is_not_brought() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    assert machine.restore(A, ONE, ms_per_token=0.0) == 0
    assert len(machine.tier) == 4


def test_a_damaged_page_ends_what_comes_back() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    second = [
        record
        for record in machine.tier._records.values()
        if record.tokens == as_array(ONE[20:24]).tobytes()
    ]
    machine.tier.file.memory[second[0].slot * PAGE_BYTES] ^= 1
    assert machine.restore(A, ONE) == 4
    assert (machine.tier.num_damaged, machine.tier.num_restored) == (1, 1)
    assert machine.keep(A, ONE) == 20
    machine.cache.audit()


def test_a_flush_forgets_the_disk_too() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    machine.cache.flush()
    assert len(machine.tier) == 0
    assert machine.keep(A, ONE) == 0


def surveyed(machine: Machine) -> dict[tuple[str, int], int]:
    """Pages on disk by where they go on: the namespace's name, and the pages before them."""
    survey = machine.cache.surveyor(1000).advance(10**6)
    assert survey is not None
    names = {
        index: seen.node.namespace.tenant
        for index, seen in enumerate(survey.nodes)
        if isinstance(seen.node, Root)
    }
    for index, seen in enumerate(survey.nodes):
        names[index] = names[index] if index in names else names[seen.parent]
    found: Counter[tuple[str, int]] = Counter()
    for index, seen in enumerate(survey.nodes):
        found[names[index], seen.node.first_page + seen.node.num_pages] += seen.num_disk
    return dict(+found)


def test_a_survey_tells_where_pages_on_disk_go_on() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    assert surveyed(machine) == {("a", 4): 4}
    machine.keep(B, [*range(200, 247)])
    assert surveyed(machine)["a", 0] == 16, "nothing of A is left on the device"


def test_a_survey_counts_every_page_on_disk_once() -> None:
    rng = random.Random(5)
    machine = Machine(12, 40)
    for _ in range(150):
        tokens = [t for _ in range(rng.randint(1, 6)) for t in [rng.randint(0, 2)] * P]
        machine.keep(rng.choice((A, B)), [*tokens, 1])
        assert sum(surveyed(machine).values()) == len(machine.tier)


@pytest.mark.parametrize(("num_pages", "num_slots"), [(9, 1), (9, 2), (12, 5), (10, 16), (14, 200)])
def test_long_walks(num_pages: int, num_slots: int) -> None:
    """Prompts that share beginnings, with flushes and leases, in pools that are too small: what is
    found is always right, the books always agree, and a larger disk finds more."""
    num_found = 0
    for seed in range(6):
        rng = random.Random(seed)
        machine = Machine(num_pages, num_slots)
        for _ in range(150):
            tokens = [t for _ in range(rng.randint(1, 6)) for t in [rng.randint(0, 1)] * P]
            tokens += [rng.randint(0, 1) for _ in range(rng.randint(1, 5))]
            name = A if rng.random() < 0.8 else B
            num_found += machine.keep(name, tokens)
            if rng.random() < 0.02:
                machine.cache.leases.expire()
                machine.cache.flush()
                machine.published.clear()
            if rng.random() < 0.05:
                machine.cache.leases.grant(name, as_array(tokens), 1e-9)
        assert machine.tier.num_restored > 0
    assert num_found


def test_walks_with_restarts(tmp_path: Path) -> None:
    """Prompts, evictions to disk and back, leases, and now and then a new server that takes over
    what the last one wrote: what is found is always right."""
    identity = Identity("m", "exact", "f16", P, PAGE_BYTES)
    num_found = num_restored = 0
    for seed in range(4):
        rng = random.Random(seed)
        machine = Machine(12, 20)
        for _ in range(200):
            tokens = [t for _ in range(rng.randint(1, 6)) for t in [rng.randint(0, 1)] * P]
            num_found += machine.keep(A if rng.random() < 0.8 else B, [*tokens, 7])
            if rng.random() < 0.1:
                machine.cache.leases.grant(A, as_array(tokens), 60)
            if rng.random() < 0.05:
                snapshot.save(tmp_path, identity, machine.cache, machine.export_page)
                after = Machine(rng.choice((8, 12, 20)), 20)
                after.published = machine.published
                restored = snapshot.load(tmp_path, identity, after.cache, after.import_page)
                assert restored.refused == ""
                num_restored += restored.num_pages
                machine = after
                machine.cache.audit()
    assert num_found > 0
    assert num_restored > 0


def test_what_is_on_its_way_is_found_by_nobody_until_it_is_there() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    restore = machine.begin(A, ONE)
    assert restore is not None
    assert len(restore.pages) == 4
    machine.cache.audit()
    assert machine.cache.peek(A, as_array(ONE)) == 16
    assert machine.begin(A, [*ONE[:20], 9, 9, 9, 9]) is restore, "it needs the same page next"
    assert machine.begin(A, [*ONE[:16], 9, 9, 9, 9]) is None
    assert machine.begin(B, ONE) is None
    machine.read_to_end(restore)
    assert (restore.ended, restore.num_tokens) == (True, 16)
    assert machine.keep(A, ONE) == 32


def test_what_was_computed_meanwhile_stays_and_what_follows_is_found_behind_it() -> None:
    machine = Machine(num_pages=20)
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    machine.keep(A, list(range(201, 281)))
    assert machine.cache.peek(A, as_array(ONE)) == 0
    restore = machine.begin(A, ONE[:17])
    assert restore is not None
    assert len(restore.pages) == 4
    match = machine.cache.match(A, as_array(ONE[:16]))
    assert machine.cache.extend(match.table, 16) is not None
    for index, page in enumerate(match.table.pages):
        machine.pages[page] = contents(A, ONE[: (index + 1) * P])
    machine.cache.publish(match.table, as_array(ONE[:16]), 16)
    machine.cache.release(match.table)
    machine.read_to_end(restore)
    machine.cache.audit()
    assert machine.restore(A, ONE) == 16, "behind pages that another computed"
    assert machine.keep(A, ONE) == 32


def test_a_flush_while_pages_are_read_drops_them_too() -> None:
    machine = Machine()
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    restore = machine.begin(A, ONE)
    assert restore is not None
    machine.cache.flush()
    machine.cache.audit()
    machine.published.clear()
    machine.keep(A, list(range(40, 60)))
    machine.read_to_end(restore)
    machine.cache.audit()
    assert restore.num_tokens == 0
    assert machine.cache.peek(A, as_array(ONE)) <= 16
    assert machine.tier.num_damaged == 0


def test_a_prompt_that_finds_no_room_waits_for_it() -> None:
    machine = Machine(num_pages=9)
    machine.keep(A, ONE)
    machine.keep(A, TWO)
    running = machine.cache.match(A, as_array(TWO)).table
    assert machine.cache.extend(running, 32) is not None
    assert machine.begin(A, ONE) is None
    machine.cache.audit()
    machine.cache.release(running)
    assert machine.restore(A, ONE) > 0


IDENTITY = Identity("m", "exact", "f16", P, PAGE_BYTES)
THREE = list(range(201, 233))


def served(folder: Path) -> Machine:
    """A machine that has three prompts, two of them partly or wholly on disk, and was saved."""
    machine = Machine(folder=folder)
    for name, tokens in ((A, ONE), (B, TWO), (A, THREE)):
        machine.keep(name, tokens)
    assert len(machine.tier) > 10
    snapshot.save(folder, IDENTITY, machine.cache, machine.export_page, machine.tier)
    return machine


def restarted(
    folder: Path, former: Machine, num_pages: int = 12, num_slots: int = 30
) -> tuple[Machine, Restored]:
    machine = Machine(num_pages, num_slots, folder, published=former.published)
    told = snapshot.load(folder, IDENTITY, machine.cache, machine.import_page, machine.tier)
    machine.cache.audit()
    return machine, told


def test_what_is_on_disk_outlives_a_restart(tmp_path: Path) -> None:
    former = served(tmp_path)
    machine, told = restarted(tmp_path, former)
    assert told.refused == ""
    assert told.num_disk_pages == len(machine.tier) == len(former.tier)
    assert len(list(tmp_path.glob("disk-*"))) == 1
    assert machine.keep(A, ONE) == 32
    assert machine.keep(B, TWO) == 32
    assert machine.restore(B, ONE) == 0


def test_in_a_smaller_pool_what_nothing_leads_to_is_dropped(tmp_path: Path) -> None:
    former = served(tmp_path)
    machine, told = restarted(tmp_path, former, num_pages=9)
    assert 0 < told.num_disk_pages < len(former.tier)
    assert told.refused == "4 pages on disk, as what stood before them had no room"
    for name, tokens in ((A, ONE), (B, TWO), (A, THREE)):
        machine.keep(name, tokens)


def test_a_book_older_than_the_file_leads_nowhere(tmp_path: Path) -> None:
    """A server that took the file over, and died without a word."""
    former = served(tmp_path)
    second, _ = restarted(tmp_path, former)
    second.keep(A, list(range(301, 333)))
    third, told = restarted(tmp_path, former)
    assert "pages on disk: its file cannot be read" in told.refused
    assert (told.num_disk_pages, len(third.tier)) == (0, 0)
    assert told.num_pages == former.cache.stats().cached
    assert len(list(tmp_path.glob("disk-*"))) == 1


def test_a_book_of_no_pages_has_nothing_to_tell(tmp_path: Path) -> None:
    former = Machine(folder=tmp_path)
    former.keep(A, THREE)
    assert len(former.tier) == 0
    snapshot.save(tmp_path, IDENTITY, former.cache, former.export_page, former.tier)
    for left in tmp_path.glob("disk-*"):
        left.unlink()
    _, told = restarted(tmp_path, former)
    assert told.refused == ""
    assert told.num_pages > 0


def test_a_file_of_another_size_is_not_taken_over_and_that_is_told(tmp_path: Path) -> None:
    former = served(tmp_path)
    _, told = restarted(tmp_path, former, num_slots=31)
    assert "pages on disk: its file has room for 30 pages" in told.refused
    machine = Machine(published=former.published)
    told = snapshot.load(tmp_path, IDENTITY, machine.cache, machine.import_page)
    assert "there is no --cache-disk now" in told.refused

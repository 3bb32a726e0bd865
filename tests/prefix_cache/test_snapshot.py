"""Warm restart: everything comes back, or is refused by name; never a wrong page."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from prefix_cache import snapshot
from prefix_cache.cache import PrefixCache
from prefix_cache.key import Namespace
from prefix_cache.lease import LeaseBudget
from prefix_cache.snapshot import Identity, Restored
from tests.prefix_cache.oracle import as_array

P, PAGE_BYTES = 4, 64
IDENTITY = Identity("m", "exact", "f16", P, PAGE_BYTES)
A = Namespace("m", "exact", "f16", "a")
SALTED = replace(A, salt="s")


@dataclass
class Memory:
    """A cache and bytes for its pages; a page's bytes are those of its prefix, told apart."""

    num_pages: int = 24
    now_s: float = 50.0
    pages: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        budget = LeaseBudget(self.num_pages, self.num_pages)
        self.cache = PrefixCache(self.num_pages, P, budget=budget, clock=lambda: self.now_s)

    def keep(self, name: Namespace, tokens: list[int]) -> None:
        match = self.cache.match(name, as_array(tokens))
        assert self.cache.extend(match.table, len(tokens)) is not None
        for index, page in enumerate(match.table.pages):
            if index >= match.num_cached_tokens // P:
                self.pages[page] = contents(name, tokens[: (index + 1) * P])
        self.cache.publish(match.table, as_array(tokens), len(tokens), tail=True)
        self.cache.release(match.table)

    def save(self, folder: Path) -> int:
        return snapshot.save(folder, IDENTITY, self.cache, self.pages.__getitem__)

    def load(self, folder: Path, identity: Identity = IDENTITY) -> Restored:
        restored = snapshot.load(folder, identity, self.cache, self.pages.__setitem__)
        self.check()
        return restored

    def check(self) -> None:
        """Every page in a tree holds what its prefix says."""
        self.cache.audit()
        for name, root in self.cache.roots():
            stack = [(child, list[int]()) for child in root.children]
            while stack:
                node, before = stack.pop()
                tokens = before + node.tokens.tolist()
                for index, page in enumerate(node.pages.tolist()):
                    end = len(before) + (index + 1) * P
                    assert self.pages[page] == contents(name, tokens[:end])
                stack += [(child, tokens) for child in node.children]

    def found(self, name: Namespace, tokens: list[int]) -> int:
        return self.cache.peek(name, as_array(tokens))


def contents(name: Namespace, tokens: list[int]) -> bytes:
    return (
        repr((name.tenant, name.salt, hash(tuple(tokens)))).encode().ljust(PAGE_BYTES)[:PAGE_BYTES]
    )


LONG = list(range(1, 20))
FORK = [*LONG[:10], 90, 91, 92]
OTHER = [7] * 6


def filled() -> Memory:
    memory = Memory()
    memory.keep(A, LONG)
    memory.keep(A, FORK)
    memory.keep(SALTED, OTHER)
    return memory


def test_everything_comes_back(tmp_path: Path) -> None:
    before = filled()
    assert before.save(tmp_path) == before.cache.stats().cached
    after = Memory()
    restored = after.load(tmp_path)
    assert (restored.refused, restored.num_leases) == ("", 0)
    for name, tokens in ((A, LONG), (A, FORK), (SALTED, OTHER)):
        assert after.found(name, tokens) == len(tokens)
    assert after.found(A, OTHER) == 0
    assert after.cache.stats() == before.cache.stats()


def test_leases_come_back_under_their_ids_with_the_time_they_had_left(tmp_path: Path) -> None:
    before = filled()
    lease = before.cache.leases.grant(A, as_array(LONG), 100)
    assert lease is not None
    before.now_s += 40
    before.save(tmp_path)
    after = Memory(now_s=9000.0)
    assert after.load(tmp_path).num_leases == 1
    (held,) = after.cache.leases.of("a")
    assert (len(held.pages), held.ttl_s, held.expires_s) == (4, 100, 9060)
    assert held.id == lease.id


def test_nothing_to_restore_is_no_fault(tmp_path: Path) -> None:
    assert Memory().load(tmp_path / "none") == Restored(0, 0, 0)


def test_a_smaller_pool_takes_what_was_used_last(tmp_path: Path) -> None:
    before = filled()
    before.save(tmp_path)
    after = Memory(num_pages=5)
    after.load(tmp_path)
    assert after.found(SALTED, OTHER) == len(OTHER)
    assert after.found(A, LONG) == 0


@pytest.mark.parametrize("field", Identity.__struct_fields__)
def test_a_foreign_snapshot_is_refused_by_what_differs(tmp_path: Path, field: str) -> None:
    filled().save(tmp_path)
    values = {name: getattr(IDENTITY, name) for name in Identity.__struct_fields__}
    values[field] = 8 if isinstance(values[field], int) else "other"
    restored = Memory().load(tmp_path, Identity(**values))
    assert restored.num_pages == 0
    assert field in restored.refused


def test_a_torn_manifest_is_refused_wherever_it_is_torn(tmp_path: Path) -> None:
    filled().save(tmp_path)
    whole = (tmp_path / snapshot.MANIFEST).read_bytes()
    rng = random.Random(3)
    for _ in range(200):
        torn = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else whole)
        if len(torn) == len(whole):
            torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
        (tmp_path / snapshot.MANIFEST).write_bytes(torn)
        restored = Memory().load(tmp_path)
        assert (restored.num_pages, restored.refused) == (0, "the snapshot's manifest is torn")


def test_a_bad_page_ends_its_prefix_and_no_other(tmp_path: Path) -> None:
    filled().save(tmp_path)
    (file,) = tmp_path.glob("pages-*")
    whole = file.read_bytes()
    for place in range(len(whole) // PAGE_BYTES):
        torn = bytearray(whole)
        torn[place * PAGE_BYTES + 3] ^= 4
        file.write_bytes(torn)
        after = Memory()
        assert "torn" in after.load(tmp_path).refused
        found = [
            after.found(name, t) < len(t) for name, t in ((A, LONG), (A, FORK), (SALTED, OTHER))
        ]
        assert any(found)
        assert not all(found)
    file.write_bytes(whole[:-1])
    assert "torn" in Memory().load(tmp_path).refused


def test_swapped_pages_are_noticed(tmp_path: Path) -> None:
    """Each page is whole, but stands where another one should."""
    filled().save(tmp_path)
    (file,) = tmp_path.glob("pages-*")
    whole = file.read_bytes()
    file.write_bytes(
        whole[PAGE_BYTES : 2 * PAGE_BYTES] + whole[:PAGE_BYTES] + whole[2 * PAGE_BYTES :]
    )
    assert "torn" in Memory().load(tmp_path).refused


def test_a_later_snapshot_replaces_the_former_and_leaves_no_files(tmp_path: Path) -> None:
    memory = filled()
    memory.save(tmp_path)
    memory.keep(A, [60, 61, 62, 63])
    memory.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    after = Memory()
    after.load(tmp_path)
    assert after.found(A, [60, 61, 62, 63]) == 4


def test_a_writer_that_fails_leaves_the_former_snapshot(tmp_path: Path) -> None:
    memory = filled()
    memory.save(tmp_path)
    exports = iter(range(3))

    def failing(page: int) -> bytes:
        if next(exports, None) is None:
            raise OSError("no space")
        return memory.pages[page]

    with pytest.raises(OSError, match="no space"):
        snapshot.save(tmp_path, IDENTITY, memory.cache, failing)
    assert Memory().load(tmp_path).refused == ""
    memory.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2

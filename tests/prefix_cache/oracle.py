"""What the pages really hold: every write and copy a server would do, done on token histories.

A slot holds the history it was computed from, (namespace, token_0, .., token_p), or GARBAGE. The
oracle knows the rules of the cache only as a backend and a client see them.
"""

from dataclasses import dataclass, field

import numpy as np

from prefix_cache.cache import Lease, PageCopy, PageTable, PrefixCache
from prefix_cache.key import Namespace
from prefix_cache.radix_tree import Node

History = tuple[object, ...]
GARBAGE: History = ()


def namespace(tenant: str) -> Namespace:
    return Namespace(model_digest="m", numeric_mode="exact", kv_dtype="f16", tenant=tenant)


def as_array(tokens: list[int]) -> np.typing.NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def common_length(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


@dataclass(eq=False)
class Sequence:
    """A live request: its tokens, and how far the step being planned computes them."""

    table: PageTable
    tokens: list[int]
    planned: int = 0
    copies: tuple[PageCopy, ...] = ()


@dataclass
class Server:
    """A cache, the memory behind it, live requests, and every prefix ever published."""

    cache: PrefixCache
    page_size: int
    num_pages: int
    live: list[Sequence] = field(default_factory=list)
    published: list[tuple[Namespace, list[int]]] = field(default_factory=list)
    leased: dict[str, list[int]] = field(default_factory=dict)
    slots: list[list[History]] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [[GARBAGE] * self.page_size for _ in range(self.num_pages)]

    def longest_published(self, name: Namespace, tokens: list[int]) -> int:
        return max((common_length(p, tokens) for n, p in self.published if n == name), default=0)

    def start(self, name: Namespace, tokens: list[int], limit: int | None = None) -> Sequence:
        sequence = Sequence(self.cache.match(name, as_array(tokens), limit).table, list(tokens))
        self.live.append(sequence)
        return sequence

    def plan(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend to `num_tokens`, with fresh pages poisoned; whether the pages sufficed."""
        before = list(sequence.table.pages)
        copies = self.cache.extend(sequence.table, num_tokens)
        if copies is None:
            assert sequence.table.pages == before
            return False
        for page in set(sequence.table.pages) - set(before):
            self.slots[page] = [GARBAGE] * self.page_size
        sequence.planned = num_tokens
        sequence.copies += copies
        return True

    def compute(self) -> list[Sequence]:
        """The step of all planned sequences: the copies, then the writes; nothing is published."""
        planned = [sequence for sequence in self.live if sequence.planned]
        copies = [copy for sequence in planned for copy in sequence.copies]
        targets = [copy.dst for copy in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.src for copy in copies}
        for copy in copies:
            self.slots[copy.dst] = list(self.slots[copy.src])
        for sequence in planned:
            for position in range(sequence.table.num_tokens, sequence.planned):
                self._write(sequence, position)
            sequence.planned, sequence.copies = 0, ()
        return planned

    def publish(self, sequence: Sequence, num_tokens: int, *, tail: bool = False) -> None:
        self.cache.publish(sequence.table, as_array(sequence.tokens), num_tokens, tail=tail)
        end = num_tokens if tail else num_tokens - num_tokens % self.page_size
        self.published.append((sequence.table.namespace, sequence.tokens[:end]))

    def run(self, sequence: Sequence, num_tokens: int, *, tail: bool = False) -> None:
        """Plan, compute and publish one sequence."""
        assert self.plan(sequence, num_tokens)
        self.compute()
        self.publish(sequence, num_tokens, tail=tail)

    def fork(self, sequence: Sequence) -> Sequence:
        table = self.cache.fork(sequence.table)
        child = Sequence(table, sequence.tokens[: table.num_tokens])
        self.live.append(child)
        return child

    def lease(self, name: Namespace, tokens: list[int], ttl_s: float) -> Lease | None:
        lease = self.cache.leases.grant(name, as_array(tokens), ttl_s)
        if lease is not None:
            self.leased[lease.id] = tokens[: len(lease.pages) * self.page_size]
        return lease

    def release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.table)
        self.live.remove(sequence)

    def check(self) -> None:
        """Audit the books, and compare what every table and every node promises with memory."""
        assert self.cache.audit() == self.cache.stats()
        if not self.live:
            assert self.cache.stats().referenced == 0
        for sequence in self.live:
            table = sequence.table
            sources = {copy.dst: copy.src for copy in sequence.copies}
            pages = [sources.get(page, page) for page in table.pages]
            self._check_slots(table.namespace, sequence.tokens[: table.num_tokens], pages)
        for lease in self.cache.leases.book:
            tokens = self.leased[lease.id]
            assert self.cache.peek(lease.namespace, as_array(tokens)) == len(tokens)
            self._check_slots(lease.namespace, tokens, lease.pages.tolist())
        for name, root in self.cache._forest.roots.items():
            for child in root.children:
                self._check_node(name, [], [], child)

    def _check_node(self, name: Namespace, tokens: list[int], pages: list[int], node: Node) -> None:
        tokens = tokens + node.tokens.tolist()
        pages = pages + node.pages.tolist()
        self._check_slots(name, tokens, pages)
        for child in node.children:
            self._check_node(name, tokens, pages, child)

    def _check_slots(self, name: Namespace, tokens: list[int], pages: list[int]) -> None:
        for position in range(len(tokens)):
            page, slot = pages[position // self.page_size], position % self.page_size
            assert self.slots[page][slot] == (name, *tokens[: position + 1])

    def _write(self, writer: Sequence, position: int) -> None:
        index, slot = divmod(position, self.page_size)
        page = writer.table.pages[index]
        for other in self.live:
            if other is not writer and page in other.table.pages:
                readable = other.table.num_tokens - other.table.pages.index(page) * self.page_size
                assert slot >= readable, "a slot that another request reads is written"
        node = self.cache._forest.node_of(page)
        if node is not None:
            offset = node.pages.tolist().index(page) * self.page_size
            assert slot >= node.num_tokens - offset, "a published slot is written"
        self.slots[page][slot] = (writer.table.namespace, *writer.tokens[: position + 1])

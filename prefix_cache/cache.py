"""The face of the prefix cache: match, extend, publish, release, fork, lease, flush, audit.

One thread calls it. README.md states the rules of pages and slots.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prefix_cache.audit import AuditError, find_differences
from prefix_cache.events import EventLog
from prefix_cache.evicted import EvictedPrefixes, Eviction
from prefix_cache.eviction import EvictionPolicy, Evictor, LeastRecentlyUsed
from prefix_cache.explain import Explanation, explain
from prefix_cache.holds import Holds
from prefix_cache.key import Namespace
from prefix_cache.lease import Lease, LeaseBook, LeaseBudget
from prefix_cache.leases import Leases
from prefix_cache.page_pool import CacheError, PageIds, PagePool, PoolCounts
from prefix_cache.page_table import PageTable
from prefix_cache.radix_tree import Match, Node, RadixForest, Root, TokenIds
from prefix_cache.repair import Repair, drop_bad_subtrees
from prefix_cache.survey import Surveyor, count_held
from prefix_cache.tiers import DiskTier
from prefix_cache.uses import origin_of, use_of

__all__ = [
    "AuditError",
    "CacheError",
    "Explanation",
    "Lease",
    "PageCopy",
    "PageTable",
    "PoolCounts",
    "PrefixCache",
    "PrefixMatch",
    "Repair",
]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy page src to page dst, all layers, before the step that writes dst."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A new table that holds references on the matched pages, how many tokens they cover, and
    why not more."""

    table: PageTable
    num_cached_tokens: int
    explanation: Explanation


class PrefixCache:
    """Pages shared between requests by token prefix, within a namespace.

    A lone request can grow to (num_pages - 1) * page_size tokens whatever is cached: one page may
    be needed for a copy. `evicted_for_room` and `evicted_by_flush` count pages since the start.
    Calls outside a method's contract raise CacheError and change nothing.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        policy: EvictionPolicy | None = None,
        *,
        budget: LeaseBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds, for leases and for when something was evicted."""
        self.page_size = page_size
        self._policy = policy or LeastRecentlyUsed()
        self.clock = clock
        self._forest = RadixForest(num_pages, page_size)
        self._pool = PagePool(num_pages, self._forest)
        self._holds = Holds(self._pool, self._forest)
        self._evicted = EvictedPrefixes(num_pages, page_size, clock)
        self._evictor = Evictor(self._pool, self._forest, self._policy, self._evicted)
        self.events = EventLog(page_size)
        self._evictor.on_cut.append(self.events.removed)
        book = LeaseBook(self._pool, budget or LeaseBudget.of(num_pages))
        self.leases = Leases(book, self._forest, self._evictor, self.events, clock)
        self._tier: DiskTier | None = None
        self._tables: set[PageTable] = set()
        self.evicted_for_room = 0
        self.evicted_by_flush = 0

    def match(
        self, namespace: Namespace, token_ids: TokenIds, limit: int | None = None
    ) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, at most `limit` tokens, also inside a page.

        Takes references on its pages, never copies, and refreshes the leases it meets. The table
        lives until `release`.
        """
        tokens = _as_tokens(token_ids)
        found = self._forest.match(namespace, tokens[:limit])
        length = found.num_tokens
        full = length // self.page_size
        eviction = self._evicted.find(namespace, tokens, length)
        origin = origin_of(found, eviction, self.page_size)
        capacity = len(tokens) // self.page_size + 1
        table = PageTable(namespace, found.runs, length, origin, capacity)
        self._hold(table.page_ids, full)
        self.leases.refresh(table.page_ids[:full])
        self._tables.add(table)
        why = self._explain(namespace, tokens, found, eviction)
        return PrefixMatch(table, length, why)

    def attach(self, tier: DiskTier) -> None:
        """Keep what is evicted from now on in a second tier."""
        self._tier = tier
        self._evictor.on_cut.append(tier.leave)

    def count_disk(self) -> tuple[int, int, int]:
        """Pages in the second tier now; since the start, those that came back from it, and those
        that were dropped, as they were not what was written."""
        tier = self._tier
        return (len(tier), tier.num_restored, tier.num_damaged) if tier is not None else (0, 0, 0)

    def find(self, namespace: Namespace, token_ids: TokenIds) -> Match:
        """What `match` would find now, to be read only; changes nothing."""
        return self._forest.match(namespace, _as_tokens(token_ids))

    def explain(self, namespace: Namespace, token_ids: TokenIds) -> Explanation:
        """What `match` would find now and why not more; changes nothing."""
        tokens = _as_tokens(token_ids)
        found = self._forest.match(namespace, tokens)
        eviction = self._evicted.find(namespace, tokens, found.num_tokens)
        return self._explain(namespace, tokens, found, eviction)

    def peek(self, namespace: Namespace, token_ids: TokenIds) -> int:
        """The length `match` would find now; changes nothing."""
        return self._forest.match(namespace, _as_tokens(token_ids)).num_tokens

    def extend(self, table: PageTable, num_tokens: int) -> tuple[PageCopy, ...] | None:
        """Make slots table.num_tokens..num_tokens-1 writable by this table, all or nothing.

        Evicts cached pages as needed. None, with nothing changed, when free and cached pages do
        not suffice. Where the first of these slots is in a page that others read too, this table
        becomes its append owner (if it has none and nobody reads beyond), or gets a copy, which
        the caller executes before the step. Among the copies of one plan no page is destination
        twice, nor source and destination: a source is kept until `publish` or `release`. Copies
        of a table that is released before the step must not be executed.
        """
        if num_tokens <= table.num_writable:
            return ()
        self._check_live(table)
        first, offset = divmod(table.num_tokens, self.page_size)
        shares_tail = bool(offset) and not table.is_append_owner
        tail = int(table.page_ids[first]) if shares_tail else -1
        copies_tail = shares_tail and not self._pool.may_append(tail, offset)
        num_new = -(-num_tokens // self.page_size) - table.num_pages + copies_tail
        missing = num_new - self._pool.num_free
        if missing > self._pool.num_cached:
            return None
        if missing > 0:
            self.evicted_for_room += self._evictor.evict(missing)
        new_pages = self._pool.allocate(num_new)
        copies: tuple[PageCopy, ...] = ()
        if copies_tail:
            copies = (PageCopy(tail, int(new_pages[0])),)
            table.copy_source = tail
            table.page_ids[first] = new_pages[0]
            new_pages = new_pages[1:]
        elif shares_tail:
            self._pool.owned[tail] = True
        table.append(new_pages)
        table.num_writable = table.num_pages * self.page_size
        return copies

    def publish(
        self, table: PageTable, token_ids: TokenIds, num_tokens: int, *, tail: bool = False
    ) -> None:
        """Say that token_ids[:num_tokens] are computed and good: they are valid in the table now.

        The full pages among them go into the tree, with `tail` also a partial last page. Where
        the tree has a full page of the same tokens the table takes it and drops its own. O(1)
        when no page became full and `tail` is False. num_tokens may not shrink, and not go beyond
        what `extend` made writable.
        """
        if not table.num_tokens <= num_tokens <= table.num_writable:
            raise CacheError(
                f"{num_tokens} tokens published; {table.num_tokens} are, "
                f"up to {table.num_writable} are writable"
            )
        page_size = self.page_size
        start = table.num_tokens // page_size
        end = num_tokens if tail else num_tokens - num_tokens % page_size
        if end > len(token_ids):
            raise CacheError(f"{num_tokens} tokens published, {len(token_ids)} given")
        table.num_tokens = num_tokens
        table.published = True
        if table.copy_source is not None:
            self._end_copy(table)
        if end > start * page_size:
            tokens = _as_tokens(token_ids[:end])
            fresh = self._insert(table, tokens[start * page_size :], start)
            self.events.stored(table.namespace, tokens, fresh)

    def release(self, table: PageTable) -> None:
        """End the table: drop its references and the append ownership of its tail.

        What it published stays cached, as used just now. Unpublished slots are lost. Raises
        CacheError the second time.
        """
        self._check_live(table)
        pages = table.page_ids
        full = table.num_tokens // self.page_size
        if table.is_append_owner:
            self._pool.owned[pages[full:]] = False
        if table.copy_source is not None:
            self._end_copy(table)
        deepest = self._deepest_node(table, full)
        if table.num_pages > full:
            self._pool.unref(pages[full:])
        if full:
            self._holds.drop(pages[:full])
        if deepest is not None:
            self._evictor.tick += 1
            deepest.use = use_of(table, deepest.use, full, self._evictor.tick, self._policy)
            assert deepest.parent is not None
            deepest.parent.latest = deepest
            self._evictor.offer(deepest)
        self._tables.remove(table)
        table.close()

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same valid slots; whoever writes into a shared page copies it,
        but for its append owner. Not between `extend` and `publish` while a copy is planned.
        """
        self._check_live(table)
        if table.copy_source is not None:
            raise CacheError("fork while the copy of the last page is planned")
        length = table.num_tokens
        pages = table.page_ids[: -(-length // self.page_size)]
        self._hold(pages, length // self.page_size)
        if length % self.page_size:
            self._pool.seal(int(pages[-1]), length % self.page_size)
        child = PageTable(table.namespace, [pages], length)
        self._tables.add(child)
        return child

    def count_exclusive(self, table: PageTable) -> int:
        """How many pages nobody would reference any more if this table were released."""
        full = table.num_tokens // self.page_size
        own = table.page_ids[full:]
        if len(own) and self._forest.is_covered(int(own[0])):
            own = own[1:]
        held = self._holds.exclusive(table.page_ids[:full]) if full else own[:0]
        refs = self._pool.refs
        return int(np.count_nonzero(refs[own] == 1) + np.count_nonzero(refs[held] == 0))

    def roots(self) -> list[tuple[Namespace, Root]]:
        """The trees, to be read only."""
        return list(self._forest.roots.items())

    def surveyor(self, max_kept: int) -> Surveyor:
        """What surveys the trees, keeping the largest subtrees."""
        return Surveyor(self._forest, max_kept, lambda: self._tier)

    def count_held(self, node: Node) -> tuple[int, int]:
        """How many of a node's pages live tables read, and how many of the others leases hold."""
        return count_held(self._pool, node)

    def find_node(self, page: int) -> tuple[Namespace, Node] | None:
        """The node that lists a page, to be read only; None where none does."""
        node = self._forest.node_of(page) if 0 <= page < len(self._pool.refs) else None
        return None if node is None else (self._forest.namespace_of(node), node)

    @property
    def tick(self) -> int:
        """How many requests have ended, as `Use.tick` counts them."""
        return self._evictor.tick

    def flush(self) -> int:
        """Drop all cached pages, those on disk too; how many of the device. Leased ones stay."""
        told, self._evictor.on_cut = self._evictor.on_cut, [self.events.removed]
        num_pages = self._evictor.evict(self._pool.num_cached)
        if self._tier is not None:
            self._tier.clear()
        self._evictor.on_cut = told
        self.evicted_by_flush += num_pages
        return num_pages

    def free_pages(self) -> list[int]:
        """Ids of the pages that hold nothing, the next to be given out first. Who writes there may
        keep nothing there."""
        return list(map(int, self._pool.free_ids[::-1]))

    def stats(self) -> PoolCounts:
        """Pages by state, O(1)."""
        return self._pool.counts()

    def audit(self) -> PoolCounts:
        """Recount everything from trees and live tables, O(pages).

        Raises AuditError naming every difference.
        """
        differences = find_differences(
            self._pool, self._forest, self._evictor, self._tables, self.leases.book
        )
        if self._tier is not None:
            differences += self._tier.differences()
        if differences:
            raise AuditError(differences)
        return self._pool.counts()

    def _explain(
        self, namespace: Namespace, tokens: TokenIds, found: Match, eviction: Eviction | None
    ) -> Explanation:
        return explain(
            self._forest,
            namespace,
            tokens,
            found,
            None if eviction is None else self.clock() - eviction.evicted_s,
        )

    def repair(self) -> Repair:
        """Audit, and where the books disagree drop the subtrees that are wrong, with their leases,
        and count the rest anew; only while no table lives (CacheError). What the second tier has
        goes too then. Nothing is raised for what is found: it is told."""
        if self._tables:
            raise CacheError(f"{len(self._tables)} tables live")
        try:
            self.audit()
        except AuditError as error:
            differences = error.differences
        else:
            return Repair((), 0)
        num_pages = drop_bad_subtrees(self._pool, self._forest, self._evictor, self.leases.book)
        if self._tier is not None:
            self._tier.clear()
        self.events.resync()
        return Repair(tuple(differences), num_pages)

    def _hold(self, pages: PageIds, num_full: int) -> None:
        """A new table lists these pages, so many of them full, and the rest in part."""
        if num_full:
            self._holds.add(pages[:num_full])
        if len(pages) > num_full:
            self._pool.ref(pages[num_full:])

    def _insert(self, table: PageTable, tokens: TokenIds, start: int) -> int:
        """Into the tree; the page index from which on the tree did not have them."""
        page_size, pool = self.page_size, self._pool
        after = int(table.page_ids[start - 1]) if start else None
        own = table.page_ids[start : start - (-len(tokens) // page_size)].copy()
        done = self._forest.insert(table.namespace, after, start, tokens, own)
        num_canonical = len(done.canonical)
        if done.replaced is not None:
            pool.delist(np.array([done.replaced], dtype=np.int64))
        num_full, rest = divmod(len(tokens), page_size)
        if num_full:
            pool.share(own[num_canonical:num_full], page_size)
            table.page_ids[start : start + num_canonical] = done.canonical
            self._holds.add(table.page_ids[: start + num_full])
            if start:
                self._holds.drop(table.page_ids[:start])
        if num_canonical:
            pool.owned[own[:num_canonical]] = False
            pool.unref(own[:num_canonical])
        if rest and len(done.listed):
            pool.enlist(done.listed[-1:])
            pool.seal(int(own[-1]), rest)
        return start + num_canonical

    def _end_copy(self, table: PageTable) -> None:
        source = table.copy_source
        assert source is not None
        table.copy_source = None
        self._pool.unref(np.array([source], dtype=np.int64))
        node = self._forest.node_of(source)
        if node is not None:
            self._evictor.offer(node)

    def _deepest_node(self, table: PageTable, full: int) -> Node | None:
        """The node of the table's last page in the tree: the partial one, else the last full."""
        ids = table.page_ids
        tail = self._forest.node_of(int(ids[full])) if len(ids) > full else None
        if tail is not None or not full:
            return tail
        return self._forest.node_of(int(ids[full - 1]))

    def _check_live(self, table: PageTable) -> None:
        if table not in self._tables:
            raise CacheError("the table was released")


def _as_tokens(token_ids: TokenIds) -> TokenIds:
    return np.ascontiguousarray(token_ids, dtype=np.int32)

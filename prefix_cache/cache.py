"""The face of the prefix cache: match, extend, publish, release, fork, flush, audit.

One thread calls it. README.md states the rules of pages and slots.
"""

from dataclasses import dataclass, field

import numpy as np

from prefix_cache.audit import AuditError, find_differences
from prefix_cache.eviction import Evictor
from prefix_cache.key import Namespace
from prefix_cache.page_pool import CacheError, PagePool, PoolCounts
from prefix_cache.radix_tree import Node, RadixForest, TokenIds

__all__ = [
    "AuditError",
    "CacheError",
    "PageCopy",
    "PageTable",
    "PoolCounts",
    "PrefixCache",
    "PrefixMatch",
]


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one live request: owned by the request, changed only by the cache.

    pages: the page of each page index; slots 0..num_tokens-1 hold valid K/V (matched, or computed
    and published), slots num_tokens..num_writable-1 may be written. copy_source: the page that a
    copy planned by `extend` reads, referenced until the step is published; None without one.
    """

    namespace: Namespace
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_writable: int = 0
    copy_source: int | None = None

    @property
    def is_append_owner(self) -> bool:
        """Whether slot num_tokens lies in a page of this table that it may write."""
        return self.num_writable > self.num_tokens


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy page src to page dst, all layers, before the step that writes dst."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A new table that holds references on the matched pages, and how many tokens they cover."""

    table: PageTable
    num_cached_tokens: int


class PrefixCache:
    """Pages shared between requests by token prefix, within a namespace.

    A lone request can grow to (num_pages - 1) * page_size tokens whatever is cached: one page may
    be needed for a copy. `evicted_for_room` and `evicted_by_flush` count pages since the start.
    Calls outside a method's contract raise CacheError and change nothing.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._pool = PagePool(num_pages)
        self._forest = RadixForest(num_pages, page_size)
        self._evictor = Evictor(self._pool, self._forest)
        self._tables: set[PageTable] = set()
        self._clock = 0
        self.evicted_for_room = 0
        self.evicted_by_flush = 0

    def match(
        self, namespace: Namespace, token_ids: TokenIds, limit: int | None = None
    ) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, at most `limit` tokens, also inside a page.

        Takes references on its pages, never copies. The table lives until `release`.
        """
        found = self._forest.match(namespace, _as_tokens(token_ids[:limit]))
        self._pool.ref(found.pages)
        length = found.num_tokens
        table = PageTable(namespace, found.pages.tolist(), length, length)
        self._tables.add(table)
        return PrefixMatch(table, length)

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
        first, offset = divmod(table.num_tokens, self._page_size)
        shares_tail = bool(offset) and not table.is_append_owner
        copies_tail = shares_tail and not self._pool.may_append(table.pages[first], offset)
        num_new = -(-num_tokens // self._page_size) - len(table.pages) + copies_tail
        missing = num_new - self._pool.num_free
        if missing > self._pool.num_cached:
            return None
        if missing > 0:
            self.evicted_for_room += self._evictor.evict(missing)
        new_pages: list[int] = self._pool.allocate(num_new).tolist() if num_new else []
        copies: tuple[PageCopy, ...] = ()
        if copies_tail:
            source = table.pages[first]
            copies = (PageCopy(source, new_pages[0]),)
            table.copy_source = source
            table.pages[first] = new_pages.pop(0)
        elif shares_tail:
            self._pool.owned[table.pages[first]] = True
        table.pages += new_pages
        table.num_writable = len(table.pages) * self._page_size
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
        page_size = self._page_size
        start = table.num_tokens // page_size
        end = num_tokens if tail else num_tokens - num_tokens % page_size
        if end > len(token_ids):
            raise CacheError(f"{num_tokens} tokens published, {len(token_ids)} given")
        table.num_tokens = num_tokens
        if table.copy_source is not None:
            self._end_copy(table)
        if end > start * page_size:
            self._insert(table, _as_tokens(token_ids[start * page_size : end]), start)

    def release(self, table: PageTable) -> None:
        """End the table: drop its references and the append ownership of its tail.

        What it published stays cached, as used just now. Unpublished slots are lost. Raises
        CacheError the second time.
        """
        self._check_live(table)
        pages = np.array(table.pages, dtype=np.int64)
        full = table.num_tokens // self._page_size
        if table.is_append_owner:
            self._pool.owned[pages[full:]] = False
        if table.copy_source is not None:
            self._end_copy(table)
        deepest = self._deepest_node(table, full)
        self._pool.unref(pages)
        if deepest is not None:
            self._clock += 1
            deepest.last_used = self._clock
            self._evictor.offer(deepest)
        self._tables.remove(table)
        table.pages = []
        table.num_tokens = 0
        table.num_writable = -1

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same valid slots; whoever writes into a shared page copies it,
        but for its append owner. Not between `extend` and `publish` while a copy is planned.
        """
        self._check_live(table)
        if table.copy_source is not None:
            raise CacheError("fork while the copy of the last page is planned")
        length = table.num_tokens
        pages = table.pages[: -(-length // self._page_size)]
        self._pool.ref(np.array(pages, dtype=np.int64))
        if length % self._page_size:
            self._pool.seal(pages[-1], length % self._page_size)
        child = PageTable(table.namespace, pages, length, length)
        self._tables.add(child)
        return child

    def count_exclusive(self, table: PageTable) -> int:
        """How many pages nobody would reference any more if this table were released."""
        return int(np.count_nonzero(self._pool.refs[table.pages] == 1))

    def flush(self) -> int:
        """Drop all cached pages; how many."""
        num_pages = self._evictor.evict(self._pool.num_cached)
        self.evicted_by_flush += num_pages
        return num_pages

    def stats(self) -> PoolCounts:
        """Pages by state, O(1)."""
        return self._pool.counts()

    def audit(self) -> PoolCounts:
        """Recount everything from trees and live tables, O(pages).

        Raises AuditError naming every difference.
        """
        differences = find_differences(self._pool, self._forest, self._evictor, self._tables)
        if differences:
            raise AuditError(differences)
        return self._pool.counts()

    def _insert(self, table: PageTable, tokens: TokenIds, start: int) -> None:
        page_size, pool = self._page_size, self._pool
        after = table.pages[start - 1] if start else None
        own = np.array(table.pages[start : start - (-len(tokens) // page_size)], dtype=np.int64)
        done = self._forest.insert(table.namespace, after, start, tokens, own)
        num_canonical = len(done.canonical)
        if num_canonical:
            duplicates = own[:num_canonical]
            pool.ref(done.canonical)
            pool.owned[duplicates] = False
            pool.unref(duplicates)
            table.pages[start : start + num_canonical] = done.canonical.tolist()
        pool.enlist(done.listed)
        if done.replaced is not None:
            pool.delist(np.array([done.replaced], dtype=np.int64))
        num_full, rest = divmod(len(tokens), page_size)
        full = own[num_canonical:num_full]
        pool.sealed[full] = page_size
        pool.owned[full] = False
        if rest and len(done.listed):
            pool.seal(int(own[-1]), rest)

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
        tail = self._forest.node_of(table.pages[full]) if len(table.pages) > full else None
        if tail is not None or not full:
            return tail
        return self._forest.node_of(table.pages[full - 1])

    def _check_live(self, table: PageTable) -> None:
        if table not in self._tables:
            raise CacheError("the table was released")


def _as_tokens(token_ids: TokenIds) -> TokenIds:
    return np.ascontiguousarray(token_ids, dtype=np.int32)

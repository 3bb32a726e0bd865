"""Prefixes on their way back from the second tier, while other requests go on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from prefix_cache.cache import CacheError, PrefixCache
from prefix_cache.key import Namespace
from prefix_cache.page_table import PageTable
from prefix_cache.radix_tree import TokenIds
from prefix_cache.tiers import DiskPage, DiskTier


@dataclass(eq=False, slots=True)
class Restore:
    """Pages that are read from disk into pages of the device that a table holds for them; nobody
    matches them before the end.

    `pages[i]` belongs at page index `first_page + i`. num_tokens: those that came back, known when
    it has ended.
    """

    table: PageTable
    tokens: TokenIds
    first_page: int
    page_size: int
    pages: tuple[DiskPage, ...]
    ended: bool = False
    num_tokens: int = 0

    def target(self, index: int) -> int:
        """The device's page for `pages[index]`."""
        return int(self.table.page_ids[self.first_page + index])

    def brings(self, namespace: Namespace, tokens: TokenIds, num_pages: int) -> bool:
        """Whether the page that goes on from the first `num_pages` of a prompt is among them."""
        if not self.first_page <= num_pages < self.first_page + len(self.pages):
            return False
        end = (num_pages + 1) * self.page_size
        same = np.array_equal(self.tokens[:end], tokens[:end])
        return same and self.table.namespace == namespace


@dataclass(slots=True)
class Restores:
    """What is on its way back into a cache from its second tier. Used on the thread of the cache.

    The caller reads the pages of what it began (`tier.read`, on any thread) into their targets, in
    order, and ends it.
    """

    cache: PrefixCache
    tier: DiskTier
    open: list[Restore] = field(default_factory=list)

    def begin(
        self, namespace: Namespace, token_ids: TokenIds, compute_ms: Callable[[int, int], float]
    ) -> Restore | None:
        """Begin to bring back what the tier has of a prompt beyond `match`, where that is cheaper
        than computing it (`compute_ms(past, count)` tells of tokens behind others) and there is
        room; the one under way, where one brings the prompt's next page."""
        if not (len(self.tier) or self.open):
            return None
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        found = self.cache.find(namespace, tokens)
        page_size = self.cache.page_size
        whole = found.num_tokens // page_size
        for each in self.open:
            if each.brings(namespace, tokens, whole):
                return each
        after = int(found.pages[whole - 1]) if whole else None
        count = self.tier.find(namespace, tokens, after, whole)
        past = whole * page_size
        if not count or count * self.tier.page_ms >= compute_ms(past, count * page_size):
            return None
        table = self.cache.match(namespace, tokens, past).table
        counts = self.cache.stats()
        if count > counts.free + counts.cached:
            self._release(table)
            return None
        pages = self.tier.take_out(namespace, tokens, after, whole, count)
        if self.cache.extend(table, past + len(pages) * page_size) is None:
            raise CacheError("free and cached pages were fewer than counted")
        restore = Restore(table, tokens.copy(), whole, page_size, pages)
        self.open.append(restore)
        return restore

    def end(self, restore: Restore, num_good: int, *, damaged: bool = False) -> None:
        """The first `num_good` pages of a restore are in their targets, and are cached from now on,
        as any; no more will come. `damaged`: as the next one was not what was written."""
        self.open.remove(restore)
        table = restore.table
        if not self.tier.is_current(restore.pages):
            num_good = 0  # all was dropped meanwhile
        num_pages = restore.first_page + num_good
        self.cache.publish(table, restore.tokens, num_pages * restore.page_size)
        landed = table.page_ids[restore.first_page : num_pages].tolist()
        self.tier.land(restore.pages, landed, damaged=damaged)
        self._release(table)
        restore.num_tokens = num_good * restore.page_size
        restore.ended = True

    def _release(self, table: PageTable) -> None:
        table.published = False  # it is no request that the policy could learn from
        self.cache.release(table)

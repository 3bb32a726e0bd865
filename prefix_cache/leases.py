"""Leases on what is in the tree: asked for by prefix, told as events, ended in time."""

from collections.abc import Callable

import numpy as np

from prefix_cache.events import EventLog
from prefix_cache.eviction import Evictor
from prefix_cache.key import Namespace
from prefix_cache.lease import Lease, LeaseBook
from prefix_cache.page_pool import PageIds
from prefix_cache.radix_tree import RadixForest, TokenIds


class Leases:
    """What the cache holds for tenants, beyond what runs. `book` has the pages and budgets."""

    def __init__(
        self,
        book: LeaseBook,
        forest: RadixForest,
        evictor: Evictor,
        events: EventLog,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives seconds."""
        self.book = book
        self._forest = forest
        self._evictor = evictor
        self._events = events
        self._clock = clock

    def grant(
        self, namespace: Namespace, token_ids: TokenIds, ttl_s: float, lease_id: str = ""
    ) -> Lease | None:
        """Hold the whole pages of a prefix for `ttl_s` from now, and from each later hit, as far
        as they are in the tree now and the tenant's budget goes; None where that is no page.

        A lease of the same pages is prolonged instead. Pages beyond the lease may be evicted.
        `lease_id` is what one that is granted again, after a restart, was called.
        """
        now_s = self._clock()
        self.expire()
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        found = self._forest.match(namespace, tokens)
        whole = found.pages[: found.num_tokens // self._forest.page_size]
        lease = self.book.grant(namespace, whole, len(tokens), ttl_s, now_s, lease_id)
        if lease is not None:
            self._events.leased(lease, self.tokens, ended=False)
        return lease

    def refresh(self, pages: PageIds) -> None:
        """A request matched these pages: the leases they cover begin anew. O(1) without leases."""
        if len(self.book):
            self.book.refresh(pages, self._clock())

    def of(self, tenant: str) -> list[Lease]:
        """The tenant's leases that hold now, the first granted first."""
        self.expire()
        return self.book.of(tenant)

    def all(self) -> list[Lease]:
        """Every tenant's leases."""
        self.expire()
        return list(self.book)

    def extend(self, tenant: str, lease_id: str, ttl_s: float) -> Lease | None:
        """Let a lease of the tenant end `ttl_s` from now; None where it has none of this id."""
        self.expire()
        lease = self.book.find(tenant, lease_id)
        if lease is not None:
            self.book.prolong(lease, ttl_s, self._clock())
        return lease

    def release(self, tenant: str, lease_id: str) -> Lease | None:
        """End a lease of the tenant; None where it has none of this id."""
        lease = self.book.find(tenant, lease_id)
        if lease is not None:
            self._end(lease)
        return lease

    def count(self) -> tuple[int, int, int]:
        """Leases, the pages that they hold, each once, and their tenants; see `expire`."""
        return len(self.book), self.book.num_pages, self.book.num_tenants

    def tokens(self, lease: Lease) -> TokenIds:
        """The tokens of the pages that a lease holds."""
        node = self._forest.node_of(int(lease.pages[-1]))
        assert node is not None
        num_tokens = len(lease.pages) * self._forest.page_size
        return self._forest.path_tokens(node, node.num_tokens)[:num_tokens]

    def expire(self) -> int:
        """End the leases whose time has passed; how many. O(1) when none has."""
        ended = self.book.expired(self._clock())
        for lease in ended:
            self._end(lease)
        return len(ended)

    def break_one(self) -> Lease | None:
        """End the lease that has least time left, for a request that could never run beside it;
        None where there is none."""
        lease = self.book.first_to_expire()
        if lease is not None:
            self._end(lease)
        return lease

    def _end(self, lease: Lease) -> None:
        self._events.leased(lease, self.tokens, ended=True)
        self.book.end(lease)
        node = self._forest.node_of(int(lease.pages[-1]))
        if node is not None:
            self._evictor.offer(node)

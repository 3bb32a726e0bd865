"""Leases: prefixes that stay, for a time that each hit renews, within a budget of pages."""

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from prefix_cache.key import Namespace
from prefix_cache.page_pool import PageIds, PagePool

_TENANT_SHARE: Final = 0.25
_TOTAL_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class LeaseBudget:
    """How many pages leases may hold: those of one tenant, and all together."""

    tenant_pages: int
    total_pages: int

    @staticmethod
    def of(num_pages: int) -> "LeaseBudget":
        """A quarter of the pool for a tenant, half of it in all."""
        return LeaseBudget(int(num_pages * _TENANT_SHARE), int(num_pages * _TOTAL_SHARE))


@dataclass(eq=False, slots=True)
class Lease:
    """Pages of a prefix, from its first one, that are not evicted before `expires_s`.

    num_tokens_asked: the length of the prefix that was asked for, of which `pages` may hold less.
    A hit is a match that reaches the last of the pages.
    """

    id: str
    namespace: Namespace
    pages: PageIds
    num_tokens_asked: int
    ttl_s: float
    expires_s: float
    num_hits: int = 0


class LeaseBook:
    """The leases there are. It pins and unpins pages; whoever ends a lease must offer what it
    held to the evictor."""

    def __init__(self, pool: PagePool, budget: LeaseBudget) -> None:
        self._pool = pool
        self._budget = budget
        self._leases: dict[str, Lease] = {}
        self._by_last_page: dict[int, Lease] = {}
        self._is_last = np.zeros(len(pool.pins), dtype=np.bool_)
        self._held: dict[str, Counter[int]] = {}
        self._num_held = 0
        self._next_expiry_s = math.inf

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_pages(self) -> int:
        """Pages that leases hold, each once."""
        return self._num_held

    @property
    def num_tenants(self) -> int:
        """Tenants that hold a lease."""
        return len(self._held)

    def of(self, tenant: str) -> list[Lease]:
        """A tenant's leases."""
        return [lease for lease in self if lease.namespace.tenant == tenant]

    def find(self, tenant: str, lease_id: str) -> Lease | None:
        """A tenant's lease by its id."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.namespace.tenant == tenant else None

    def grant(
        self,
        namespace: Namespace,
        pages: PageIds,
        num_tokens: int,
        ttl_s: float,
        now_s: float,
        lease_id: str = "",
    ) -> Lease | None:
        """Pin as many of a prefix's pages, from the first on, as the budget has room for; None
        where that is none. A lease that ends in the same page is prolonged instead. `lease_id` is
        what one that is granted again was called."""
        held = self._held.get(namespace.tenant, Counter())
        pages = pages[: self._num_affordable(pages, held)]
        if not len(pages):
            return None
        last = int(pages[-1])
        lease = self._by_last_page.get(last)
        if lease is not None:
            lease.num_tokens_asked = max(lease.num_tokens_asked, num_tokens)
            self.prolong(lease, max(ttl_s, lease.ttl_s), now_s)
            return lease
        expires_s = now_s + ttl_s
        lease_id = lease_id or f"lease_{secrets.token_hex(8)}"
        lease = Lease(lease_id, namespace, pages.copy(), num_tokens, ttl_s, expires_s)
        self._num_held += int(np.count_nonzero(self._pool.pins[pages] == 0))
        self._pool.pin(lease.pages)
        self._held[namespace.tenant] = held
        held.update(lease.pages.tolist())
        self._leases[lease_id] = self._by_last_page[last] = lease
        self._is_last[last] = True
        self._next_expiry_s = min(self._next_expiry_s, expires_s)
        return lease

    def end(self, lease: Lease) -> None:
        """Let go of the pages."""
        del self._leases[lease.id]
        last = int(lease.pages[-1])
        del self._by_last_page[last]
        self._is_last[last] = False
        self._pool.unpin(lease.pages)
        self._num_held -= int(np.count_nonzero(self._pool.pins[lease.pages] == 0))
        tenant = lease.namespace.tenant
        held = self._held[tenant]
        held.subtract(lease.pages.tolist())
        self._held[tenant] = +held
        if not self._held[tenant]:
            del self._held[tenant]

    def begin_anew(self, leases: Iterable[Lease]) -> None:
        """Keep these leases alone, and count what they hold; the pool's pins are not changed."""
        kept = list(leases)
        self._leases = {lease.id: lease for lease in kept}
        self._by_last_page = {int(lease.pages[-1]): lease for lease in kept}
        self._is_last[:] = False
        self._is_last[list(self._by_last_page)] = True
        self._held = {}
        for lease in kept:
            held = self._held.setdefault(lease.namespace.tenant, Counter())
            held.update(lease.pages.tolist())
        self._num_held = len({page for lease in kept for page in lease.pages.tolist()})

    def prolong(self, lease: Lease, ttl_s: float, now_s: float) -> None:
        """From now on it lasts `ttl_s`."""
        lease.ttl_s = ttl_s
        lease.expires_s = now_s + ttl_s
        self._next_expiry_s = min(self._next_expiry_s, lease.expires_s)

    def refresh(self, pages: PageIds, now_s: float) -> None:
        """A request matched these pages: the leases they cover begin anew."""
        if not self._leases:
            return
        for page in pages[self._is_last[pages]].tolist():
            lease = self._by_last_page[page]
            lease.expires_s = now_s + lease.ttl_s
            lease.num_hits += 1

    def expired(self, now_s: float) -> list[Lease]:
        """Those whose time has passed; to be ended. O(1) while it cannot be any."""
        if now_s < self._next_expiry_s:
            return []
        ended = [lease for lease in self if lease.expires_s <= now_s]
        alive = (lease.expires_s for lease in self if lease.expires_s > now_s)
        self._next_expiry_s = min(alive, default=math.inf)
        return ended

    def first_to_expire(self) -> Lease | None:
        """The lease with least time left."""
        return min(self, key=lambda lease: lease.expires_s, default=None)

    def _num_affordable(self, pages: PageIds, held: Counter[int]) -> int:
        """How many of the pages fit into both budgets; those held already cost nothing."""
        new_to_tenant = np.array([page not in held for page in pages.tolist()], dtype=np.bool_)
        new_to_all = self._pool.pins[pages] == 0
        fits = np.cumsum(new_to_tenant) + len(held) <= self._budget.tenant_pages
        fits &= np.cumsum(new_to_all) + self._num_held <= self._budget.total_pages
        return len(pages) if fits.all() else int(fits.argmin())

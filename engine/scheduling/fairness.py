"""Fairness between tenants, counted in tokens: a virtual token counter each (arXiv:2401.00588)."""

from dataclasses import dataclass
from typing import Final

OUTPUT_WEIGHT: Final = 2.0
"""An output token counts as that many prompt tokens: it needs a step of its own."""
_REMEMBERED_IDLE: Final = 1024


@dataclass(slots=True)
class _Tenant:
    served: float
    num_live: int = 0


class VirtualTokens:
    """Who was served how much, in tokens over the tenant's weight: the least served goes first.

    A tenant that comes to others starts at no less than the least served of them: nobody saves up
    service by being away. Only tokens that were computed count. With nobody there all is forgotten.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def join(self, tenant: str) -> None:
        """One more live request of this tenant."""
        entry = self._tenants.setdefault(tenant, _Tenant(0.0))
        if not entry.num_live:
            live = [other.served for other in self._tenants.values() if other.num_live]
            entry.served = max(entry.served, min(live, default=0.0))
        entry.num_live += 1

    def leave(self, tenant: str) -> None:
        """One live request less."""
        self._tenants[tenant].num_live -= 1
        idle = [name for name, entry in self._tenants.items() if not entry.num_live]
        if len(idle) == len(self._tenants) or len(idle) > _REMEMBERED_IDLE:
            for name in idle:
                del self._tenants[name]

    def charge(self, tenant: str, num_tokens: float, weight: float) -> None:
        """The tenant was served."""
        self._tenants[tenant].served += num_tokens / weight

    def served(self, tenant: str) -> float:
        """The counter of a tenant with live requests."""
        return self._tenants[tenant].served

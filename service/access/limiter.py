"""How much a tenant may use: requests and tokens per minute, requests at a time.

Rates are kept by the generic cell rate algorithm (ITU-T I.371, annex A): one number per tenant and
rate, the time at which what was used is paid off. A minute's worth may come at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from service.access.keys import TenantLimits
from service.errors import ApiError
from service.events import RequestRecord

WINDOW_S: Final = 60.0
ROUNDING_S: Final = 1e-6
SOON_S: Final = 1.0
"""When to try again where nobody knows when a running request ends."""


@dataclass(slots=True)
class _Rate:
    """What was used, as the moment when it is paid off at the allowed rate."""

    paid_off_s: float = 0.0

    def wait_s(self, now_s: float, next_s: float = 0.0) -> float:
        """How long until more may be used that takes `next_s` to pay off; 0 for now."""
        return max(0.0, self.paid_off_s + next_s - WINDOW_S - now_s - ROUNDING_S)

    def use(self, amount: int, per_minute: int, now_s: float) -> None:
        self.paid_off_s = max(self.paid_off_s, now_s) + amount * WINDOW_S / per_minute


@dataclass(slots=True)
class _Used:
    requests: _Rate = field(default_factory=_Rate)
    tokens: _Rate = field(default_factory=_Rate)


class TenantLimiter:
    """Admits requests of tenants within their limits. Used from one event loop only.

    Tokens are known when a request has ended and are charged then: a tenant can overdraw by what
    it has running, and then waits until that is paid off.
    """

    def __init__(
        self,
        limits_of: Callable[[str], TenantLimits],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits_of = limits_of
        self._now_s = now_s
        self._used: dict[str, _Used] = {}
        self._running: Counter[str] = Counter()

    @contextmanager
    def admit(self, record: RequestRecord) -> Iterator[None]:
        """Counts a request of the record's tenant while the body runs, then the tokens it used.

        Raises ApiError 429 with the time after which the same request would be taken.
        """
        tenant = record.tenant
        limits = self._limits_of(tenant)
        self._take(tenant, limits)
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if limits.tokens_per_minute is not None and record.usage is not None:
                num_tokens = record.usage.prompt_tokens + record.usage.output_tokens
                self._used[tenant].tokens.use(num_tokens, limits.tokens_per_minute, self._now_s())

    def weight(self, tenant: str) -> float:
        """The tenant's share of the engine, beside those of others."""
        return self._limits_of(tenant).weight

    def num_running(self, tenant: str) -> int:
        """Requests of a tenant that run now."""
        return self._running[tenant]

    def _take(self, tenant: str, limits: TenantLimits) -> None:
        now_s = self._now_s()
        most_running = limits.concurrent_requests
        if most_running is not None and self._running[tenant] >= most_running:
            raise _too_much(f"{most_running} requests at a time", SOON_S)
        used = self._used.setdefault(tenant, _Used())
        if limits.tokens_per_minute is not None and (wait_s := used.tokens.wait_s(now_s)):
            raise _too_much(f"{limits.tokens_per_minute} tokens per minute", wait_s)
        if limits.requests_per_minute is not None:
            each_s = WINDOW_S / limits.requests_per_minute
            if wait_s := used.requests.wait_s(now_s, each_s):
                most = f"{limits.requests_per_minute} requests per minute"
                raise _too_much(most, wait_s)
            used.requests.use(1, limits.requests_per_minute, now_s)
        self._running[tenant] += 1


def _too_much(most: str, wait_s: float) -> ApiError:
    wait_ms = max(1, round(wait_s * 1000))
    return ApiError(
        429,
        f"This key's limit is {most}; try again in {wait_s:.1f} s.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(-(-wait_ms // 1000)), "retry-after-ms": str(wait_ms)},
    )

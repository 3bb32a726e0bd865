"""Limits of tenants against a clock that the test turns."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from service.access.keys import TenantLimits
from service.access.limiter import TenantLimiter
from service.errors import ApiError
from service.events import RequestRecord, Usage


class Bench:
    """A limiter, and its clock."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 1000.0
        table = {"a": TenantLimits(**limits)}
        self.limiter = TenantLimiter(
            lambda tenant: table.get(tenant, TenantLimits()), lambda: self.now_s
        )

    @contextmanager
    def request(self, tenant: str = "a", num_tokens: int = 0) -> Iterator[None]:
        record = RequestRecord("chat", "m", 0, tenant=tenant)
        with self.limiter.admit(record):
            yield
            record.usage = Usage(num_tokens, 0, 0)

    def refused_ms(self) -> int:
        """When a refused request may come again."""
        with pytest.raises(ApiError) as refused, self.request():
            pass
        assert refused.value.status == 429
        assert int(refused.value.headers["retry-after"]) >= 1
        return int(refused.value.headers["retry-after-ms"])


def test_a_minutes_requests_may_come_at_once_and_then_at_their_rate() -> None:
    bench = Bench(requests_per_minute=6)
    for _ in range(6):
        with bench.request():
            pass
    assert bench.refused_ms() == 10_000
    bench.now_s += 9.9
    assert bench.refused_ms() == 100
    bench.now_s += 0.1
    with bench.request():
        pass
    assert bench.refused_ms() == 10_000


def test_the_time_told_is_the_time_that_opens() -> None:
    bench = Bench(requests_per_minute=7)
    for _ in range(50):
        while True:
            try:
                with bench.request():
                    break
            except ApiError as error:
                bench.now_s += int(error.headers["retry-after-ms"]) / 1000 + 0.001


def test_tokens_are_charged_when_they_are_known() -> None:
    bench = Bench(tokens_per_minute=1000)
    with bench.request(num_tokens=900):
        pass
    with bench.request(num_tokens=700):
        pass  # begun within the limit, it may overdraw
    assert bench.refused_ms() == 36_000
    bench.now_s += 36.0
    with bench.request(num_tokens=1):
        pass


def test_requests_at_a_time() -> None:
    bench = Bench(concurrent_requests=2)
    with ExitStack() as running:
        running.enter_context(bench.request())
        running.enter_context(bench.request())
        assert bench.refused_ms() == 1000
        assert bench.limiter.num_running("a") == 2
    assert bench.limiter.num_running("a") == 0
    with bench.request():
        pass


def test_a_failed_request_is_counted_down() -> None:
    bench = Bench(concurrent_requests=1)
    with pytest.raises(ZeroDivisionError), bench.request():
        raise ZeroDivisionError
    with bench.request():
        pass


def test_tenants_have_limits_of_their_own() -> None:
    bench = Bench(requests_per_minute=1)
    with bench.request():
        pass
    assert bench.refused_ms()
    for _ in range(100):
        with bench.request("b"):
            pass

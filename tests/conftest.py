"""Triton kernels run in Triton's interpreter in all tests, on CPU tensors. Triton decides that for
each of its functions when it is imported, so the switch is set before anything can import it.

The seed of the order is told also where -q hides pytest's header, which has it.

Properties are not timed: how long an example takes says how busy the machine is. Their fixtures
may be those of the test as a whole.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "headwater",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("headwater")


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.pluginmanager.has_plugin("randomly") and config.get_verbosity() < 0 and reporter:
        reporter.write_line(f"in an order of --randomly-seed={config.getoption('randomly_seed')}")

"""Triton kernels run in Triton's interpreter in all tests, on CPU tensors. Triton decides that for
each of its functions when it is imported, so the switch is set before anything can import it.

The seed of the order is told also where -q hides pytest's header, which has it.
"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.pluginmanager.has_plugin("randomly") and config.get_verbosity() < 0 and reporter:
        reporter.write_line(f"in an order of --randomly-seed={config.getoption('randomly_seed')}")

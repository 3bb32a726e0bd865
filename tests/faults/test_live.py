"""A server that does not end tells the test why."""

from pathlib import Path

import pytest

from tests.faults.live import ENDLESS, serving


def test_what_a_server_waits_for_is_in_the_failure(tmp_path: Path) -> None:
    with serving(tmp_path, script=ENDLESS) as server:
        with pytest.raises(AssertionError, match="the server does not end") as failed:
            server.wait_end(0.1)  # nobody told it to
        told = str(failed.value)
        assert "in _serve" in told  # a task
        assert "run_forever" in told or "most recent call first" in told  # a thread

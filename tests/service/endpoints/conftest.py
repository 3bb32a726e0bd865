"""One server for each file of tests, with its stage."""

from collections.abc import Iterator

import pytest

from tests.service.conftest import LiveServer, run_server
from tests.service.endpoints.stage import Stage


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="module")
def server(stage: Stage) -> Iterator[LiveServer]:
    with run_server(script_for=stage) as running:
        yield running

"""Each test runs over both borders: a thread under asyncio, a process under uvloop."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.scripted import ScriptFile
from engine.transport import EngineClient
from tests.engine.transport.playing import Start, start_engine


@pytest.fixture(params=["thread", "process"])
def border(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def anyio_backend(border: str) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": border == "process"}


@pytest.fixture
async def start(border: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts engines; they are closed after the test, and must leave no thread behind."""
    engines: list[EngineClient] = []

    async def begin(
        file: ScriptFile = ScriptFile(),  # noqa: B008 (frozen)
        *,
        max_running: int = 64,
        max_waiting: int = 1024,
    ) -> EngineClient:
        engines.append(await start_engine(border, tmp_path, file, max_running, max_waiting))
        return engines[-1]

    yield begin
    for engine in engines:
        await engine.close()
        assert engine.num_open == 0
    # Workers of an earlier test's event loop may end meanwhile, so only ours are counted.
    assert not [each for each in threading.enumerate() if each.name.startswith("engine")]

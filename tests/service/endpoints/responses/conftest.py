import pytest


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn and the engine's client need asyncio."""
    return "asyncio"

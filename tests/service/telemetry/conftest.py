import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The edge and the engine's client need asyncio."""
    return "asyncio"

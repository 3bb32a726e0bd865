"""`python -m tests.faults.serve serve ...`: the server, with parts that fail when asked."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import service.__main__ as command
from engine.text import Encoder, TextAssets, load_text
from engine.transport import start_supervised_engine
from tests.faults.control import take

STALL_S = 1.0


class FailingEncoder(Encoder):
    """An encoder that raises once each time, and can stall its server's event loop."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self._encoder.prefix_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> NDArray[np.int32]:
        if take("tokenizer"):
            raise RuntimeError("injected into the tokenizer")
        if threading.current_thread() is threading.main_thread() and take("stall"):
            time.sleep(STALL_S)
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)


def load_failing_text(path: Path) -> TextAssets:
    """`load_text`, with its encoder wrapped."""
    assets = load_text(path)
    return replace(assets, encoder=FailingEncoder(assets.encoder))


if __name__ == "__main__":
    command.load_text = load_failing_text  # type: ignore[attr-defined]
    command.start_supervised_engine = partial(  # type: ignore[attr-defined]
        start_supervised_engine, module="tests.faults.engine"
    )
    raise SystemExit(command.main())

"""`python -m tests.faults.engine`: the engine process, with a backend that fails when asked."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import engine.runtime
from engine.__main__ import main
from kernels.contract import ForwardBatch, StepLogits, do_nothing
from kernels.registry import Selection, select_backend
from tests.faults.control import take


class FailingBackend:
    """A backend whose steps raise, hang or compute what is no number, once each time."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(
        self,
        model: object,
        kv: object,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        if take("raise"):
            raise RuntimeError("injected into the step")
        if take("hang"):
            while True:
                time.sleep(60)
        logits: StepLogits = self._backend.step(model, kv, batch, meanwhile)
        if len(batch.logit_rows) and take("nan"):
            if logits.full is not None:
                logits.full[0] = np.nan
            elif logits.logsumexp is not None:
                logits.logsumexp[0] = np.nan
        return logits


def select_failing(name: str, *, threads: int, exact: bool) -> Selection:
    """`select_backend`, with its choice wrapped."""
    chosen = select_backend(name, threads=threads, exact=exact)
    return Selection(FailingBackend(chosen.backend), chosen.name, chosen.reason)


if __name__ == "__main__":
    engine.runtime.select_backend = select_failing  # type: ignore[attr-defined]
    raise SystemExit(main())

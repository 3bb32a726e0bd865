"""Runs planned steps on a backend."""

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Generic

import numpy as np

from engine.execution.batch_planner import BatchPlanner
from engine.execution.forward_batch import SequenceChunk
from kernels.contract import Backend, ForwardBatch, K, M, StepLogits, do_nothing


class ModelRunner(Generic[M, K]):
    """One model and its page memory on one backend."""

    def __init__(self, backend: Backend[M, K], model: M, kv: K) -> None:
        self._backend = backend
        self._model = model
        self._kv = kv
        self._planner = BatchPlanner(kv.layout.page_size)
        self._prepared: ForwardBatch | None = None
        self.kernel_ns = 0
        """How long the last step computed."""

    def run(
        self,
        chunks: Sequence[SequenceChunk],
        copies: Sequence[tuple[int, int]],
        num_top: int,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        """Copy pages (source, destination), then compute the chunks, and do something meanwhile.
        Raises what the backend raises; the slots of the chunks are garbage then."""
        if copies:
            pages = np.array(copies, dtype=np.int32)
            src, dst = np.ascontiguousarray(pages[:, 0]), np.ascontiguousarray(pages[:, 1])
            self._backend.copy_pages(self._kv, src, dst)
        batch = self._planner.plan(chunks, num_top)
        self._backend.prepare(self._model, self._kv, batch)
        return self._step(batch, meanwhile)

    def prepare(self, chunks: Sequence[SequenceChunk], num_top: int) -> None:
        """Prepare a step that may come next, while one runs perhaps: of single tokens, which are
        not known yet. Raises what the backend raises."""
        self._prepared = None
        batch = self._planner.plan(chunks, num_top)
        self._backend.prepare(self._model, self._kv, batch)
        self._prepared = batch

    def run_prepared(
        self, token_ids: Sequence[int], meanwhile: Callable[[], None] = do_nothing
    ) -> StepLogits:
        """As `run`, with the chunks of the last `prepare`, and these tokens in them."""
        batch, self._prepared = self._prepared, None
        assert batch is not None
        batch.token_ids[:] = token_ids
        return self._step(batch, meanwhile)

    def _step(self, batch: ForwardBatch, meanwhile: Callable[[], None]) -> StepLogits:
        start_ns = monotonic_ns()
        logits = self._backend.step(self._model, self._kv, batch, meanwhile)
        self.kernel_ns = monotonic_ns() - start_ns
        return logits

    def export_page(self, page: int) -> bytes:
        """The contents of a page, in an order that does not depend on where it stands."""
        return self._backend.export_page(self._kv, page)

    def import_page(self, page: int, data: bytes) -> None:
        """The inverse of `export_page`."""
        self._backend.import_page(self._kv, page, data)

    def close(self) -> None:
        """Release the backend's threads and memory."""
        self._backend.close()

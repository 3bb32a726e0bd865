"""A plan's step: its chunks become a batch, its rows of logits tokens."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from engine.execution.forward_batch import SequenceChunk
from engine.execution.runner import ModelRunner
from engine.execution.sampler import SampledToken, Sampler, required_top
from engine.scheduling.scoring import score_prompts
from engine.scheduling.step_plan import ScheduledChunk, StepPlan
from engine.types import PromptLogprobs
from kernels.contract import StepLogits


class Computed(msgspec.Struct, frozen=True):
    """What came out of the step of a plan. Of each chunk that is sampled from, in order: its first
    row in the `sampler`, and the token from there, None where the row is not finite. `told` is what
    the scored positions say, by request. `step_ns` is when it began and ended, `kernel_ns` how long
    the backend computed."""

    plan: StepPlan
    sampler: Sampler
    rows: Sequence[int]
    tokens: Sequence[SampledToken | None]
    told: dict[str, PromptLogprobs | None]
    step_ns: tuple[int, int]
    kernel_ns: int


class StepComputer:
    """Computes steps; also the following one of the one that runs, as far as it is known."""

    def __init__(
        self, runner: ModelRunner[Any, Any], vocab_size: int, clock_ns: Callable[[], int]
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._clock_ns = clock_ns
        self._prepared: StepPlan | None = None

    def prepare(self, plan: StepPlan) -> None:
        """This plan, of single tokens that are not known yet, may come next. Nothing is changed
        but what this holds."""
        self._prepared = None
        chunks = [_sequence_chunk(chunk, (0,)) for chunk in plan.chunks]
        self._runner.prepare(chunks, self._num_top(plan))
        self._prepared = plan

    def compute(self, plan: StepPlan, begun_ns: int, meanwhile: Callable[[], None]) -> Computed:
        """The step, and something done meanwhile. Raises what the backend raises."""
        chunks = plan.chunks
        sampled: Sequence[ScheduledChunk] = chunks
        rows: Sequence[int] = range(len(chunks))
        if not (lone := plan is self._prepared):
            sampled = [chunk for chunk in chunks if chunk.wants_logits]
            rows = [0, *accumulate(chunk.num_sampled for chunk in sampled)]
        logits = self._logits(plan, meanwhile)
        told: dict[str, PromptLogprobs | None] = {}
        if not lone and any(chunk.scored for chunk in chunks):
            told, logits = score_prompts(chunks, logits, self._clock_ns())
        sampler = Sampler(logits)
        tokens: list[SampledToken | None] = []
        for row, chunk in zip(rows, sampled, strict=False):
            request = chunk.request
            tokens.append(
                sampler.choose(row, request.sampling, request.num_tokens, request.logit_rules)
            )
        step_ns = begun_ns, self._clock_ns()
        return Computed(plan, sampler, rows, tokens, told, step_ns, self._runner.kernel_ns)

    def _logits(self, plan: StepPlan, meanwhile: Callable[[], None]) -> StepLogits:
        prepared, self._prepared = self._prepared, None
        if plan is prepared:
            token_ids = [chunk.request.token_id(chunk.start) for chunk in plan.chunks]
            return self._runner.run_prepared(token_ids, meanwhile)
        copies = [(copy.src, copy.dst) for chunk in plan.chunks for copy in chunk.copies]
        chunks = [_sequence_chunk(chunk, chunk.drafts) for chunk in plan.chunks]
        return self._runner.run(chunks, copies, self._num_top(plan), meanwhile)

    def _num_top(self, plan: StepPlan) -> int:
        sampled = [chunk.request for chunk in plan.chunks if chunk.wants_logits]
        masked = any(request.logit_rules is not None for request in sampled)
        if masked or any(chunk.scored for chunk in plan.chunks):
            return 0
        return required_top([request.sampling for request in sampled], self._vocab_size)


def _sequence_chunk(chunk: ScheduledChunk, drafts: Sequence[int]) -> SequenceChunk:
    request = chunk.request
    assert request.table is not None
    return SequenceChunk(
        request.token_ids_with(drafts),
        chunk.start,
        chunk.end,
        chunk.num_valid,
        request.table.page_ids,
        chunk.logits,
        request.table,
    )

"""A token for each row of a step."""

from collections.abc import Sequence

from engine.execution.penalties import LogitRules
from engine.execution.sampler import SampledToken, Sampler
from engine.types import SamplingParams
from kernels.contract import StepLogits


def sample(
    logits: StepLogits,
    rows: Sequence[SamplingParams],
    positions: Sequence[int],
    rules: Sequence[LogitRules | None] = (),
) -> list[SampledToken | None]:
    """The first tokens of as many requests as there are rows; empty `rules` is none for all."""
    sampler, each = Sampler(logits), rules or [None] * len(rows)
    return [
        sampler.choose(row, params, position, rule)
        for row, (params, position, rule) in enumerate(zip(rows, positions, each, strict=True))
    ]

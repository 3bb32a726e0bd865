"""Log-probabilities of prompt tokens, from the rows of a step."""

import math
from collections.abc import Sequence

from engine.execution.sampler import score
from engine.scheduling.step_plan import ScheduledChunk
from engine.types import PromptLogprobs, TokenLogprobs
from kernels.contract import StepLogits


def score_prompts(
    chunks: Sequence[ScheduledChunk], logits: StepLogits, now_ns: int
) -> tuple[dict[str, PromptLogprobs | None], StepLogits]:
    """What the scored positions say, by request (None where it is not finite), and the rows that
    are left to sample from."""
    full = logits.full
    assert full is not None
    told: dict[str, PromptLogprobs | None] = {}
    left: list[int] = []
    row = 0
    for chunk in chunks:
        request = chunk.request
        if chunk.scored:
            scores: list[TokenLogprobs] = []
            num_top = request.sampling.prompt_logprobs
            assert num_top is not None
            for position in chunk.scored:
                token_id = int(request.token_ids[position + 1])
                scores.append(score(full[row], token_id, num_top))
                row += 1
            good = not any(math.isnan(each.logprob) for each in scores)
            first = chunk.scored.start + 1
            event = PromptLogprobs(request.id, first, tuple(scores), now_ns)
            told[request.id] = event if good else None
        if chunk.wants_logits:
            left += range(row, row + chunk.num_sampled)
            row += chunk.num_sampled
    return told, StepLogits(full[left])

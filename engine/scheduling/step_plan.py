"""Who computes how many tokens in one step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduling.request import Request
from prefix_cache.cache import PageCopy


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, end) of a request. Slots below `num_valid` are already written: K and V of
    the tokens from `start` to there are recomputed for their logits, and not written again.
    `copies` must be done before the step. The logits of the positions in `scored` score the
    prompt's next tokens; those of the last token are sampled from if `wants_logits`.
    """

    request: Request
    start: int
    end: int
    num_valid: int
    copies: tuple[PageCopy, ...]
    wants_logits: bool
    scored: range = range(0)

    @property
    def logits(self) -> range:
        """Positions whose logits are wanted."""
        if not self.wants_logits:
            return self.scored
        return range(self.scored.start if self.scored else self.end - 1, self.end)


@dataclass(slots=True)
class StepPlan:
    """What the next step computes, who was admitted for it, and who can never be served."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    hopeless: list[Request] = field(default_factory=list)


def fair_shares(wants: Sequence[int], budget: int) -> list[int]:
    """Split `budget` tokens over `wants`: equal shares, and what a small one leaves goes to the
    others, so a short remainder is never stuck behind a long prompt."""
    shares = [0] * len(wants)
    left = budget
    for rank, index in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        shares[index] = min(wants[index], -(-left // (len(wants) - rank)))
        left -= shares[index]
    return shares

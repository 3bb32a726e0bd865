"""Who computes how many tokens in one step."""

from dataclasses import dataclass, field

import msgspec

from engine.scheduling.request import Request
from prefix_cache.cache import PageCopy


class ScheduledChunk(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request. Slots below `num_valid` are already written: K and V of
    the tokens from `start` to there are recomputed for their logits, and not written again.
    `copies` must be done before the step. The logits of the positions in `scored` score the
    prompt's next tokens; those of the last token are sampled from if `wants_logits`. The last
    tokens may be `drafts`, which the request has not said yet: they and the token before them are
    sampled from, one after another, for as long as that gives the draft that comes next.
    """

    request: Request
    start: int
    end: int
    num_valid: int
    copies: tuple[PageCopy, ...]
    wants_logits: bool
    scored: range = range(0)
    drafts: tuple[int, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Rows of logits that are sampled from, the last of the chunk's."""
        return 1 + len(self.drafts) if self.wants_logits else 0

    @property
    def is_followed(self) -> bool:
        """Whether, if its token is none that ends the request, another single one comes next."""
        request = self.request
        return (
            self.wants_logits
            and self.num_valid <= self.start
            and self.end == self.start + 1 == request.num_tokens
            and request.num_output_tokens + 1 < request.max_new_tokens
            and request.credits > 1
            and not self.scored
            and not self.drafts
            and not request.sampling.stop
            and request.logit_rules is None
            and request.sampling.logprobs is None
        )

    @property
    def logits(self) -> range:
        """Positions whose logits are wanted."""
        if not self.wants_logits:
            return self.scored
        first = self.scored.start if self.scored else self.end - self.num_sampled
        return range(first, self.end)


@dataclass(slots=True)
class StepPlan:
    """What the next step computes, who was admitted for it, and who can never be served. `is_full`
    if some prompt got less than it wanted, `passes_oldest` if the oldest one got nothing."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    hopeless: list[Request] = field(default_factory=list)
    is_full: bool = False
    passes_oldest: bool = False

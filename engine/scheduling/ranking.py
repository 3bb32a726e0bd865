"""Who goes first: urgency, then fairness between tenants, then size or age."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.scheduling.fairness import VirtualTokens
from engine.scheduling.itl_controller import Room
from engine.scheduling.prefill_lanes import Claim, Rank, share
from engine.scheduling.request import Request
from engine.scheduling.step_time import StepTimeModel

MAX_SCORED_ROWS = 64
"""Prompt positions scored per step: each needs a whole row of logits."""


@dataclass(slots=True)
class Ranking:
    """Puts requests that run and that wait into one order.

    By age, a request counts as older by the time that its cached or computed prefix saves: the
    longest one goes first among those that came together, and no one is overtaken by requests
    that came later than a whole prompt takes. By size, what a tenant was served counts as much
    as what is left of the prompt: of all the virtual finishing times, the earliest goes first.
    """

    model: StepTimeModel
    ttft_target_ms: float
    fairness: VirtualTokens = field(default_factory=VirtualTokens)
    by_size: bool = True
    oldest_first: bool = False

    def served(self, tenant: str) -> float:
        """The tenant's virtual tokens."""
        return self.fairness.served(tenant)

    def watch(self, oldest: Iterable[Request], now_ns: int) -> None:
        """Before each step with prompts. While somebody has waited half of the time it was
        promised, all go by age; not for one that has waited all of it, whose promise nobody's
        patience mends."""
        self.oldest_first = not self.oldest_first
        promised_ns = self.ttft_target_ms * 1e6
        self.by_size = not any(
            promised_ns / 2 <= now_ns - request.arrival_ns < promised_ns for request in oldest
        )

    def share(self, claims: Sequence[Claim], room: Room, num_waiting: int) -> list[int]:
        """How much of the room each gets, in the order of this step."""
        return share(
            claims,
            room,
            by_size=self.by_size,
            oldest_first=self.oldest_first,
            num_waiting=num_waiting,
        )

    def age(self, request: Request) -> Rank:
        """The order by age."""
        num_done = max(request.num_matched_tokens, request.num_computed_tokens)
        saved_ns = num_done * self.model.token_ms * 1e6
        served = self.served(request.tenant)
        return (*request.order[:2], served, request.arrival_ns - saved_ns, request.arrival)

    def claims(self, requests: Sequence[Request]) -> list[Claim]:
        """What each could compute now. For one that waits, as it was matched last."""
        num_scoring = sum(request.is_scoring for request in requests)
        most = max(1, MAX_SCORED_ROWS // num_scoring) if num_scoring else 0
        return [self._claim(request, most) for request in requests]

    def _claim(self, request: Request, most_scored: int) -> Claim:
        past = request.num_computed_tokens
        if request.table is None:
            past = min(request.num_matched_tokens, request.num_tokens - 1)
        if request.is_scoring:
            past = min(past, request.num_scored)
        left = request.num_tokens - past
        finish = self.served(request.tenant) + left / request.weight
        by_size = (*request.order[:2], finish, 0.0, request.arrival)
        want = min(left, most_scored) if request.is_scoring else left
        return Claim(past, want, by_size, self.age(request))

"""The life of one request inside the engine."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.execution.penalties import LogitRules
from engine.speculation.drafter import Drafter
from engine.stats import StepWork
from engine.text import StopMatcher
from engine.types import EngineRequest, LeaseInfo, Phase, SamplingParams, unpack_tokens
from prefix_cache.cache import Explanation, PageTable
from prefix_cache.key import Namespace
from prefix_cache.restore import Restore

MAX_PREEMPTIONS: Final = 3
"""After so many a request is *settled*: it comes back when there is room for all it may ever
need, keeps that reserved, and runs to its end."""
MAX_FORCED: Final = 64
"""Tokens taken from a grammar at a time: a reader's credits outlast them."""
_BRIEF_TOKENS: Final = 16


class RequestStatus(IntEnum):
    """Where a request is; FINISHED is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


_LEGAL = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}


class IllegalTransition(RuntimeError):
    """A request was moved to a status that does not follow from the one it has."""


class Request:
    """Mutable, owned by the scheduler, touched only by the engine's thread.

    The one rule: `num_computed_tokens` catches up with `num_tokens`. A token is computed when its
    K and V stand in the pages of `table`; the newest token of the output is known but not yet
    computed, and so are those that its grammar forced before it.
    `table` is None unless the request runs (or is being admitted in the current plan).
    `leader`, while this one waits, computes tokens of its prompt too, up to `leads_until`.
    `num_disk_tokens`: brought back for it from the second tier, `num_restored_tokens` of them since
    it ran last; `restore` is under way for it, and `was_restored` once one has ended since it ran
    last. `num_matched_on_arrival`: of its
    prompt, cached when it was first looked at, -1 before that.
    `max_new_tokens` is `max_tokens` cut to what the context leaves room for.
    `lent_priority` is that of its most urgent follower. `num_matched_tokens`, while it waits, is
    how much of it was cached when it was last looked up; `num_passed_tokens` is what those needed
    who were admitted before it while it found no room. `was_started` once it has run.
    `num_preemptions` counts the times it gave way though its reader kept up.
    `num_scored`: the logits of the prompt's positions below it, which score the tokens after them,
    are told or were not asked for. `donor` is the request that computed the last cached token.
    `num_draft_tokens` were computed for it, and `num_accepted_tokens` of them were what it said.
    """

    __slots__ = (
        "_compute_ns",
        "_drafter",
        "_kernel_ns",
        "_memory_ns",
        "_phase_start_ns",
        "_phases",
        "_prediction",
        "_stop_matcher",
        "_token_ids",
        "arrival",
        "arrival_ns",
        "credits",
        "deadline_ns",
        "donor",
        "end_token_ids",
        "explanation",
        "id",
        "keep",
        "leader",
        "leads_until",
        "leases",
        "lent_priority",
        "logit_rules",
        "max_new_tokens",
        "namespace",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_disk_tokens",
        "num_draft_tokens",
        "num_matched_on_arrival",
        "num_matched_tokens",
        "num_passed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_restored_tokens",
        "num_scored",
        "num_tokens",
        "prefill_end",
        "priority",
        "restore",
        "sampling",
        "shown_token_ids",
        "status",
        "table",
        "tenant",
        "was_restored",
        "was_started",
        "weight",
    )

    def __init__(
        self,
        request: EngineRequest,
        prompt: NDArray[np.int32],
        namespace: Namespace,
        *,
        arrival: int,
        now_ns: int,
        max_context: int,
        logit_rules: LogitRules | None = None,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.id = request.id
        self.sampling: SamplingParams = request.sampling
        self.shown_token_ids = frozenset(request.shown_token_ids)
        self.namespace = namespace
        self.tenant = request.tenant
        self.weight = request.weight
        self.priority = request.priority
        self.lent_priority = request.priority
        self.arrival = arrival
        self.arrival_ns = now_ns
        self.deadline_ns = request.deadline_ns
        self.credits = request.credits
        self.max_new_tokens = min(self.sampling.max_tokens, max_context - prompt.size)
        self.num_prompt_tokens = prompt.size
        self.num_tokens = prompt.size
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.donor = ""
        self.num_scored = prompt.size - 1 if self.sampling.prompt_logprobs is None else 0
        self.logit_rules = logit_rules
        self.end_token_ids = end_token_ids
        self.num_matched_tokens = 0
        self.num_passed_tokens = 0
        self.num_preemptions = 0
        self.was_started = False
        self.prefill_end = prompt.size
        self.status = RequestStatus.WAITING
        self.table: PageTable | None = None
        self.keep = request.keep
        self.leases: list[LeaseInfo] = []
        self.explanation: Explanation | None = None
        self.num_matched_on_arrival = -1
        self.num_disk_tokens = 0
        self.num_restored_tokens = 0
        self.restore: Restore | None = None
        self.was_restored = False
        self.leader: Request | None = None
        self.leads_until = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._drafter: Drafter | None = None
        self._prediction = request.prediction
        self._stop_matcher: StopMatcher | None = None
        self._token_ids = np.empty(prompt.size + min(self.max_new_tokens, 256) + 1, dtype=np.int32)
        self._token_ids[: prompt.size] = prompt
        self._phases: list[Phase] = []
        self._phase_start_ns = now_ns
        self._kernel_ns = self._memory_ns = self._compute_ns = 0

    @property
    def stop_matcher(self) -> StopMatcher | None:
        """Built at the first token: its automaton is large, and a request that waits needs none."""
        if self._stop_matcher is None and self.sampling.stop:
            self._stop_matcher = StopMatcher(self.sampling.stop)
        return self._stop_matcher

    @property
    def urgency(self) -> int:
        """The priority it is served with: its own, or that of one who waits for it."""
        return min(self.priority, self.lent_priority)

    @property
    def is_settled(self) -> bool:
        """Whether it gave way so often that it will not again."""
        return self.num_preemptions >= MAX_PREEMPTIONS

    @property
    def order(self) -> tuple[int, bool, int]:
        """Who takes pages first in a step."""
        return self.urgency, not self.is_settled, self.arrival

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and output so far, int32 [num_tokens], a view valid until the next `append`."""
        return self._token_ids[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is behind it, or all but one token: it moves in every step."""
        return self.num_computed_tokens >= self.prefill_end or self.num_uncomputed_tokens == 1

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are still to be scored: their positions are computed for that."""
        return self.num_scored < self.num_prompt_tokens - 1

    @property
    def samples(self) -> bool:
        """Whether the last known token is computed for its logits; else only for its pages."""
        return self.max_new_tokens > 0

    @property
    def is_brief(self) -> bool:
        """Whether its answer is over before it counts as a stream."""
        return self.max_new_tokens <= _BRIEF_TOKENS

    @property
    def grammar_complete(self) -> bool:
        """Whether the output matches its grammar and nothing can follow."""
        matcher = self.logit_rules.matcher if self.logit_rules is not None else None
        return matcher is not None and matcher.complete

    def forced(self) -> list[int]:
        """What must come next, so that no step has to choose it: nothing where log-probabilities
        were asked for, which a step would tell."""
        rules = self.logit_rules
        if rules is None or self.sampling.logprobs is not None:
            return []
        return rules.forced()[: max(0, min(MAX_FORCED, self.credits))]

    @property
    def fault(self) -> str:
        """Why no token can be chosen for it."""
        matcher = self.logit_rules.matcher if self.logit_rules is not None else None
        return (matcher.fault if matcher else "") or "the model's logits are not finite"

    @property
    def drafter(self) -> Drafter:
        """Knows all tokens up to now; built when it is first asked for."""
        if self._drafter is None:
            prompt = self._token_ids[: self.num_prompt_tokens]
            self._drafter = Drafter(prompt, unpack_tokens(self._prediction))
        self._drafter.follow(self.token_ids)
        return self._drafter

    @property
    def max_drafts(self) -> int:
        """How many of the next tokens it may need to have computed: it has credit for them and
        for one after them, and says no more."""
        return min(self.credits, self.max_new_tokens - self.num_output_tokens) - 1

    @property
    def paused(self) -> bool:
        """Without credit: nothing is computed for it until the reader returns some."""
        return self.credits <= 0 and self.samples

    def last_phases(self, count: int) -> tuple[Phase, ...]:
        """Of the phases that have ended, the last ones."""
        return tuple(self._phases[-count:])

    @property
    def phase_start_ns(self) -> int:
        """When the present phase began."""
        return self._phase_start_ns

    def token_ids_with(self, drafts: Sequence[int]) -> NDArray[np.int32]:
        """`token_ids` with drafts behind them, where the next `append` overwrites them."""
        if not drafts:
            return self.token_ids
        end = self.num_tokens + len(drafts)
        self._make_room(end)
        self._token_ids[self.num_tokens : end] = drafts
        return self._token_ids[:end]

    def token_id(self, position: int) -> int:
        """Of prompt and output so far."""
        return self._token_ids.item(position)

    def advance(self, token_id: int) -> None:
        """A step computed the last token, and gave this one. Its `complete` is yet to come."""
        self.num_computed_tokens = self.num_tokens
        self.append(token_id)

    def append(self, token_id: int) -> None:
        """Add a token of the output, count it and take one credit."""
        self._make_room(self.num_tokens + 1)
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.credits -= 1
        if self.logit_rules is not None:
            self.logit_rules.note(token_id)

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > self._token_ids.size:
            grown = np.empty(num_tokens + self._token_ids.size, dtype=np.int32)
            grown[: self.num_tokens] = self.token_ids
            self._token_ids = grown

    def move_to(self, status: RequestStatus) -> None:
        """Change status. Raises IllegalTransition."""
        if status not in _LEGAL[self.status]:
            raise IllegalTransition(f"{self.id}: {self.status.name} to {status.name}")
        self.status = status

    def add_work(self, step: StepWork) -> None:
        """A step computed tokens of the request, in its current phase."""
        self._kernel_ns += step.kernel_ns
        self._memory_ns += step.memory_ns
        self._compute_ns += step.compute_ns

    def stamp(
        self,
        name: str,
        end_ns: int,
        *,
        num_tokens: int = 0,
        start_position: int = 0,
        num_disk_tokens: int = 0,
    ) -> None:
        """End the current phase as `name`; the next one begins where it ended."""
        self._phases.append(
            Phase(
                name,
                self._phase_start_ns,
                end_ns,
                num_tokens,
                start_position,
                self._kernel_ns,
                self._memory_ns,
                self._compute_ns,
                num_disk_tokens,
            )
        )
        self._phase_start_ns = end_ns
        self._kernel_ns = self._memory_ns = self._compute_ns = 0

    def close_phases(self, end_ns: int) -> tuple[Phase, ...]:
        """All phases up to `end_ns`: without a gap from arrival to the end."""
        if end_ns > self._phase_start_ns or not self._phases:
            self.stamp_current(end_ns)
        return tuple(self._phases)

    def stamp_current(self, end_ns: int) -> None:
        """End whatever phase the request is in, as it stops here (preempted or ended)."""
        if self.status is not RequestStatus.RUNNING:
            self.stamp("queue", end_ns)
        elif self.num_computed_tokens < self.prefill_end:
            self.stamp("prefill", end_ns, start_position=self.num_computed_tokens)
        else:
            done = self.num_computed_tokens - self.prefill_end
            self.stamp("decode", end_ns, num_tokens=done, start_position=self.prefill_end)

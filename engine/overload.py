"""What an engine refuses at the call because it would come too late, and when to come back.

It stands at the edge's end of the border, so that a refusal waits for no step. What it knows of
the engine is the `EngineLoad` that comes with each step, and what was sent and has not started.
"""

from dataclasses import dataclass
from typing import Final

from engine.api import EngineOverloaded
from engine.stats import EngineLoad
from engine.types import EngineRequest, Prompt, Started

CAUTION: Final = 0.75
"""Refused is what would take more than this share of the time promised: an expectation errs."""
SHORTEST_RETRY_S: Final = 0.02
UNKNOWN_RETRY_S: Final = 1.0
"""When to come back to an engine that has measured nothing yet."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How many requests may run and wait, how many prompt tokens may wait, and how long the first
    token may take, 0 for no such promise."""

    max_open: int
    max_waiting_tokens: int
    ttft_target_ms: float = 0.0


@dataclass(slots=True)
class _Ahead:
    """Requests and tokens that are served before one that comes now."""

    requests: float = 0.0
    tokens: float = 0.0


class Backlog:
    """The requests that wait, and what one that came now would have to wait for."""

    def __init__(self, bounds: QueueBounds) -> None:
        self.load = EngineLoad()
        self._bounds = bounds
        self._waiting: dict[str, Prompt] = {}
        self._num_tokens = 0

    def admit(self, request: EngineRequest, num_open: int) -> None:
        """Count a request as waiting. Raises EngineOverloaded, with the time after which the same
        request would be taken if nobody else came, when it cannot be served in time."""
        new = Prompt(request.tenant, request.weight, request.priority, len(request.token_ids) // 4)
        self.check(new, num_open)
        self._waiting[request.id] = new
        self._num_tokens += new.num_tokens

    def check(self, new: Prompt, num_open: int) -> None:
        """Raises as `admit`, and counts nothing."""
        bounds = self._bounds
        if num_open >= bounds.max_open:
            raise EngineOverloaded(f"{num_open} requests run or wait already", self._until_next_s())
        excess = self._num_tokens + new.num_tokens - bounds.max_waiting_tokens
        if self._waiting and excess > 0:
            raise EngineOverloaded(
                f"{self._num_tokens} prompt tokens wait already", self._until_computed_s(excess)
            )
        promised_s = bounds.ttft_target_ms / 1e3 * CAUTION
        expected_s = self._expected_ttft_s(new) if promised_s else 0.0
        if expected_s > promised_s and self._is_busy:
            raise EngineOverloaded(
                f"the first token would take about {expected_s:.1f} s",
                max(SHORTEST_RETRY_S, expected_s - promised_s),
            )

    def start(self, event: Started) -> None:
        """A request was admitted by the engine."""
        self.end(event.request_id)

    def end(self, request_id: str) -> None:
        """A request waits no more, whyever."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._num_tokens -= waiting.num_tokens

    @property
    def _is_busy(self) -> bool:
        """Whether there is anything to wait for: a lone request is served however long it takes."""
        return bool(self._waiting or self.load.prefill_tokens or self.load.free_places < 1)

    def _expected_ttft_s(self, new: Prompt) -> float:
        """From now to the first token; 0 where the engine has measured nothing yet."""
        load = self.load
        if not load.prefill_tokens_per_s:
            return 0.0
        ahead = self._ahead(new)
        by_age = load.prefill_tokens + load.computed_share * (ahead.tokens + new.num_tokens)
        # Half of each step goes by size: there, only smaller ones are ahead.
        by_size = 2 * load.computed_share * (self._smaller(new) + new.num_tokens)
        prefill_s = min(by_age, by_size) / load.prefill_tokens_per_s
        own_s = load.computed_share * new.num_tokens / load.prefill_tokens_per_s
        return max(prefill_s, self._place_s(ahead.requests) + own_s)

    def _place_s(self, num_ahead: float) -> float:
        """From now until there is a place for one more, after so many others."""
        load = self.load
        num_places = load.free_places + len(load.place_waits_s)
        rounds, place = divmod(int(num_ahead), max(1, num_places))
        later = place - load.free_places
        return (load.place_waits_s[later] if later >= 0 else 0.0) + rounds * load.life_s

    def _ahead(self, new: Prompt) -> _Ahead:
        """All that is more urgent, all of the own tenant, and of other tenants what their weights
        give them until the own tenant has had its share."""
        ahead = _Ahead()
        equals: dict[str, tuple[_Ahead, float]] = {}
        for other in self._waiting.values():
            if other.priority > new.priority:
                continue
            into = ahead
            if other.priority == new.priority and other.tenant != new.tenant:
                into = equals.setdefault(other.tenant, (_Ahead(), other.weight))[0]
            into.requests += 1
            into.tokens += other.num_tokens
        own_tokens = ahead.tokens + new.num_tokens
        for line, weight in equals.values():
            part = min(1.0, own_tokens * weight / new.weight / line.tokens)
            ahead.requests += part * line.requests
            ahead.tokens += part * line.tokens
        return ahead

    def _smaller(self, new: Prompt) -> int:
        return sum(
            other.num_tokens
            for other in self._waiting.values()
            if (other.priority, other.num_tokens) <= (new.priority, new.num_tokens)
        )

    def _until_computed_s(self, num_tokens: float) -> float:
        """How long so many tokens of prompts that wait take."""
        load = self.load
        if not load.prefill_tokens_per_s:
            return UNKNOWN_RETRY_S
        seconds = load.computed_share * num_tokens / load.prefill_tokens_per_s
        return max(SHORTEST_RETRY_S, seconds)

    def _until_next_s(self) -> float:
        """How long until one more of those that wait has started."""
        mean_tokens = self._num_tokens / max(1, len(self._waiting))
        seconds = self._until_computed_s(mean_tokens)
        return max(seconds, self._place_s(0))

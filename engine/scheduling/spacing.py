"""Streams whose prompts came together are set apart, so that they do not come together again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.scheduling.request import Request
from engine.scheduling.step_plan import StepPlan

_TOGETHER: Final = 10
"""Requests came together if the one has waited so many times as long as between the two."""


@dataclass(slots=True)
class Spacing:
    """Whether the streams have the next step for themselves.

    Agents of one fleet say about as much each turn. Those that begin in steps next to each other
    end in steps next to each other, and the next prompt of each comes just when that of the one
    before it is being computed, and waits for all of it: so it goes on, turn for turn, while for
    the rest of the time no prompt is there at all. With a step of the streams between two first
    tokens, an agent is back when the next one ends. That short step is all that it costs anybody.
    """

    _begun: tuple[Request, ...] = ()

    def note(self, plan: StepPlan) -> None:
        """This is the step that is computed next."""
        self._begun = tuple(
            chunk.request
            for chunk in plan.chunks
            if chunk.wants_logits and chunk.start < chunk.request.prefill_end
        )

    def holds_back(self, prompts: Sequence[Request], now_ns: int) -> bool:
        """Whether all prompts that could be computed came together with some whose first tokens
        are of the last step."""
        return bool(self._begun) and all(self._came_together(each, now_ns) for each in prompts)

    def _came_together(self, request: Request, now_ns: int) -> bool:
        return any(
            abs(request.arrival_ns - begun.arrival_ns) * _TOGETHER < now_ns - begun.arrival_ns
            for begun in self._begun
        )

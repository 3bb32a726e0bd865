"""Streams whose prompts came together are set apart, so that they do not come together again."""

from dataclasses import dataclass, field
from typing import Final

from engine.scheduling.request import Request
from engine.scheduling.step_plan import StepPlan

_TOGETHER: Final = 10
"""Requests came together if the one has waited so many times as long as between the two."""


@dataclass(slots=True)
class Spacing:
    """Which prompts sit a step out: those that came together with one whose first token just came.

    Agents of one fleet say about as much each turn. Those that begin in steps next to each other
    end in steps next to each other, and the next prompt of each comes just when that of the one
    before it is being computed, and waits for all of it: so it goes on, turn for turn, while for
    the rest of the time no prompt is there at all. With a step of the streams between two first
    tokens, an agent is back when the next one ends. That step is all that this costs anybody.
    """

    _begun: list[Request] = field(default_factory=list)
    _moments: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, now_ns: int, *, has_streams: bool) -> None:
        """The next step is planned: nobody sits out one that has no streams."""
        self._moments = [
            (request.arrival_ns, (now_ns - request.arrival_ns) // _TOGETHER)
            for request in self._begun
            if has_streams
        ]
        self._begun.clear()

    def note(self, plan: StepPlan) -> None:
        """This is the step that is computed next."""
        self._begun += [
            chunk.request
            for chunk in plan.chunks
            if chunk.wants_logits and chunk.start < chunk.request.prefill_end
        ]

    def sits_out(self, request: Request) -> bool:
        """Whether the prompt is left to the step after this one."""
        return any(abs(request.arrival_ns - at_ns) < near_ns for at_ns, near_ns in self._moments)

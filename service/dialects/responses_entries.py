"""What a response tells: the canonical events, what this dialect alone has, and how it ended."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.types import FinishReason
from service.events import Completed, Event, Failed, Usage

ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Progress:
    """A sign of life that was told; it has a number of its own."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Who asked for the response cancelled it, or left: the end of it. `steered`: it goes on in
    another response, with what its client has added."""

    usage: Usage | None = None
    steered: bool = False


Entry: TypeAlias = Event | Progress | Cancelled


def final_status(event: Completed | Failed, *, generates: bool) -> ResponseStatus:
    """How a response ended; a warm-up that computed its prompt is complete."""
    if isinstance(event, Failed):
        return "failed"
    cut = generates and event.finish_reason is FinishReason.LENGTH
    return "incomplete" if cut else "completed"

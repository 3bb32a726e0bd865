"""Events that are made as late as they are read: that may be while the next step computes."""

from collections.abc import Callable, Iterator

from engine.types import EngineEvent


class Untold:
    """The events of a step, made when they are first read, or settled."""

    def __init__(self, make: Callable[[], list[EngineEvent]]) -> None:
        self._make: Callable[[], list[EngineEvent]] | None = make
        self._events: list[EngineEvent] = []

    def __iter__(self) -> Iterator[EngineEvent]:
        self.settle()
        return iter(self._events)

    def settle(self) -> None:
        """Make them now."""
        make, self._make = self._make, None
        if make is not None:
            self._events = make()

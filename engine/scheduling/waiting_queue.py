"""Requests that wait, each tenant's in a line of its own, and which of them to look at."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from engine.scheduling.request import Request

OLDEST: Final = 16
SHORTEST: Final = 8
"""Looked at per tenant and step: so many of its oldest and of its shortest prompts."""
TENANTS: Final = 8
"""Looked at per step: the tenants with the most urgent requests, of these the least served."""


@dataclass(slots=True)
class _Line:
    by_age: list[Request] = field(default_factory=list)
    by_size: list[Request] = field(default_factory=list)


class WaitingQueue:
    """A bounded look at the queue costs the same however long it is."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.num_tokens = 0
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(line.by_age for line in self._lines.values())

    def add(self, request: Request) -> None:
        """Its priority and its tokens stay as they are while it waits."""
        line = self._lines.setdefault(request.tenant, _Line())
        insort(line.by_age, request, key=_age)
        insort(line.by_size, request, key=_size)
        self._num_requests += 1
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Take out one that was added."""
        line = self._lines[request.tenant]
        del line.by_age[bisect_left(line.by_age, _age(request), key=_age)]
        del line.by_size[bisect_left(line.by_size, _size(request), key=_size)]
        if not line.by_age:
            del self._lines[request.tenant]
        self._num_requests -= 1
        self.num_tokens -= request.num_tokens

    def heads(self) -> Iterator[Request]:
        """The first of each tenant's line: its most urgent, of these the oldest."""
        return (line.by_age[0] for line in self._lines.values())

    def look(
        self, served: Callable[[str], float], wants: Callable[[Request], bool]
    ) -> list[Request]:
        """Those to choose from now: `wants` passes over others, which take no one's place."""
        lines = sorted(
            self._lines.items(),
            key=lambda item: (item[1].by_age[0].priority, served(item[0])),
        )
        found: dict[str, Request] = {}
        for _, line in lines[:TENANTS]:
            for order, most in ((line.by_age, OLDEST), (line.by_size, SHORTEST)):
                num = 0
                for request in order:
                    if request.id in found:
                        num += 1
                    elif wants(request):
                        found[request.id] = request
                        num += 1
                    if num == most:
                        break
        return list(found.values())


def _age(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _size(request: Request) -> tuple[int, int, int]:
    return request.priority, request.num_tokens, request.arrival

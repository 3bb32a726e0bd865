"""How prompts share a step: few short ones one after another, else half by size, half by age."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduling.itl_controller import Room

Rank = tuple[int, bool, float, float, int]
"""Lower goes first: urgency, settled ones, the tenant's virtual tokens, age, arrival."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A prompt that could compute `want` tokens behind `past` others in this step."""

    past: int
    want: int
    by_size: Rank
    by_age: Rank


def share(
    claims: Sequence[Claim],
    room: Room,
    *,
    by_size: bool = True,
    oldest_first: bool = False,
    num_waiting: int = 0,
) -> list[int]:
    """Use up the room, or as much of it as pays; the tokens of each claim, many of them 0.

    Half of the room goes to the least remaining work: a short prompt gets it at once, however
    many long ones are there. The other half goes to the oldest, which so keeps half of the speed
    it would have alone, however many short ones come. What one half leaves the other takes: of one
    with much behind it, half of the room may be too little to be worth it where all of it is not,
    so in the first half none is passed that gets nothing. An
    oldest one that could end in this step needs no half: all goes to the least work, or with
    `oldest_first` to the oldest, which must be so in every other step.
    Without `by_size` everything goes by age. Where there is nothing instead of this room, the
    oldest gets a token in any case.

    `num_waiting` prompts wait for a part, or as many as there are claims if that is more.
    """
    num_waiting = max(num_waiting, len(claims))
    filling = _Filling(claims, num_waiting, room.num_streams, room.bare_ms, room.bare_ms)
    oldest = sorted(range(len(claims)), key=lambda index: claims[index].by_age)
    shortest = sorted(range(len(claims)), key=lambda index: claims[index].by_size)
    order = oldest
    if by_size and len(claims) > 1:
        if math.isfinite(room.bare_ms) and _could_end(claims[oldest[0]], room):
            order = oldest if oldest_first else shortest
        else:
            half = room.halve()
            filling.spared_ms += half.ms
            filling.fill(shortest, half, in_turn=True)
            room.take_back(half)
            filling.fill(oldest[:1], room, always=True)
            order = oldest[1:]
    filling.fill(order, room)
    shares = filling.shares
    if oldest and room.instead is None and not any(shares):
        shares[oldest[0]] = 1
    return shares


def served_oldest(claims: Sequence[Claim], shares: Sequence[int]) -> bool:
    """Whether the oldest of them, of which there is one at least, got a part."""
    oldest = min(range(len(claims)), key=lambda index: claims[index].by_age)
    return shares[oldest] > 0


def _could_end(claim: Claim, room: Room) -> bool:
    return room.copy().take(claim.past, claim.want) == claim.want


@dataclass(slots=True)
class _Filling:
    """The shares of a step. Prompts that are left to the next one wait `spared_ms` longer than it
    takes for them alone."""

    claims: Sequence[Claim]
    num_waiting: int
    num_streams: int
    step_ms: float
    spared_ms: float
    shares: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.shares = [0] * len(self.claims)

    def fill(
        self, order: Sequence[int], room: Room, *, always: bool = False, in_turn: bool = False
    ) -> None:
        """Use the room in this order, `always` or for as long as that pays, or `in_turn` until one
        gets nothing."""
        for index in order:
            if room.is_spent:
                return
            claim, done = self.claims[index], self.shares[index]
            rest = room.copy()
            more = rest.take(claim.past + done, claim.want - done, begun=done > 0)
            ends = done + more == claim.want
            if more and not always and not self._joins(room.ms - rest.ms, ends):
                return
            if in_turn and not more:
                return
            self.shares[index] += more
            self.step_ms += room.ms - rest.ms
            room.tokens, room.ms = rest.tokens, rest.ms

    def _joins(self, cost_ms: float, ends: bool) -> bool:
        """Whether the step may take so much longer, once a prompt ends in it. That delays this
        first token; the streams not more than another step would, but unevenly: by as much as it
        is a part of the step. If another prompt `ends` by it, all who still wait are spared a
        step's other costs. Few that wait are so computed one after another, which ends each but
        the last sooner than all at once, and keeps the pauses of streams short; of many, a step
        takes as many as pay."""
        num_ending = sum(n == claim.want for n, claim in zip(self.shares, self.claims, strict=True))
        if not num_ending or math.isinf(self.spared_ms):
            return True
        unevenness = cost_ms / (self.step_ms + cost_ms)
        delayed_ms = (num_ending + self.num_streams * unevenness) * cost_ms
        return ends and delayed_ms < (self.num_waiting - num_ending) * self.spared_ms

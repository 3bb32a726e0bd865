"""How prompts share a step: half of it by least remaining work, half by age."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def share(claims: Sequence[Claim], room: Room, *, by_size: bool = True) -> list[int]:
    """Use up the room; the tokens of each claim, many of them 0.

    Half of the room goes to the least remaining work: a short prompt gets it at once, however
    many long ones are there. The other half goes to the oldest, which so keeps half of the speed
    it would have alone, however many short ones come. What one half leaves the other takes.
    Without `by_size` everything goes by age. Where there is nothing instead of this room, the
    oldest gets a token in any case.
    """
    shares = [0] * len(claims)
    oldest = sorted(range(len(claims)), key=lambda index: claims[index].by_age)
    shortest = sorted(range(len(claims)), key=lambda index: claims[index].by_size)
    if by_size and len(claims) > 1:
        half = room.halve()
        _fill(shares, shortest, claims, half)
        room.take_back(half)
    _fill(shares, oldest, claims, room)
    if oldest and room.instead is None and not any(shares):
        shares[oldest[0]] = 1
    return shares


def served_oldest(claims: Sequence[Claim], shares: Sequence[int]) -> bool:
    """Whether the oldest of them, of which there is one at least, got a part."""
    oldest = min(range(len(claims)), key=lambda index: claims[index].by_age)
    return shares[oldest] > 0


def _fill(shares: list[int], order: list[int], claims: Sequence[Claim], room: Room) -> None:
    for index in order:
        if room.is_spent:
            return
        claim = claims[index]
        done = shares[index]
        shares[index] += room.take(claim.past + done, claim.want - done, begun=done > 0)

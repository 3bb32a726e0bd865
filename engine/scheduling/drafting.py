"""How many drafts a step verifies: as many as give more tokens for its time than none."""

from collections.abc import Sequence
from typing import Final

from engine.scheduling.itl_controller import ItlController, Room
from engine.scheduling.request import Request

MAX_DRAFTS: Final = 16


def choose_drafts(
    wanted: Sequence[tuple[Request, int]], room: Room, controller: ItlController
) -> dict[Request, tuple[int, ...]]:
    """The drafts of those streams that have some worth their time, which is taken from the room.
    `wanted` is how many of its tokens each stream computes: drafts come after the last of them.

    An accepted draft spares a stream's share of a step without drafts: it may cost no more than
    that times its chance.
    """
    chosen: dict[Request, tuple[int, ...]] = {}
    able = [each for each in wanted if _may_draft(*each)]
    if not able:
        return chosen
    token_worth_ms = controller.streams_ms([request for request, _ in wanted]) / len(wanted)
    for request, num_tokens in able:
        most = min(MAX_DRAFTS, request.max_drafts, room.tokens)
        begin_ms = room.model.pair_ms * request.num_tokens if num_tokens == 1 else 0.0
        count, cost_ms = _worth(request, most, room, token_worth_ms, begin_ms)
        if count:
            chosen[request] = request.drafter.draft(count)
            room.tokens -= count
            room.ms -= cost_ms
    return chosen


def _may_draft(request: Request, num_tokens: int) -> bool:
    """Whether there is a draft behind so many of its tokens."""
    return (
        num_tokens == request.num_uncomputed_tokens
        and request.num_computed_tokens >= request.prefill_end
        and request.max_drafts > 0
        and request.drafter.has_draft
    )


def _worth(
    request: Request, most: int, room: Room, token_worth_ms: float, begin_ms: float
) -> tuple[int, float]:
    """How many drafts pay best, and what they cost: each its own, and `begin_ms` what the lone
    token takes more in a longer chunk, which reads its past as pairs too."""
    past = request.num_tokens
    cost_ms = begin_ms
    gain_ms = -begin_ms
    best, best_ms, best_cost_ms = 0, 0.0, 0.0
    chance = 1.0
    for number, right in enumerate(request.drafter.chances()):
        chance *= right
        each_ms = room.model.row_ms + room.model.longer_ms(past + number, 1)
        cost_ms += each_ms
        if number == most or cost_ms > room.ms or chance * token_worth_ms <= each_ms:
            break
        gain_ms += chance * token_worth_ms - each_ms
        if gain_ms > best_ms:
            best, best_ms, best_cost_ms = number + 1, gain_ms, cost_ms
    return best, best_cost_ms

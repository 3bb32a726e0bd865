"""How many drafts a step verifies: as many as give more tokens for its time than none."""

from collections.abc import Sequence
from typing import Final

from engine.scheduling.itl_controller import Room
from engine.scheduling.request import Request
from engine.scheduling.step_time import StepTimeModel

MAX_DRAFTS: Final = 16


def choose_drafts(
    wanted: Sequence[tuple[Request, int]], room: Room, streams_ms: float
) -> dict[Request, tuple[int, ...]]:
    """The drafts of those streams that have some worth their time, which is taken from the room.
    `wanted` is how many of its tokens each stream computes: drafts come after the last of them.

    `streams_ms` is what a step without drafts would take: an accepted draft spares a stream's
    share of it, and may cost no more than that times its chance.
    """
    chosen: dict[Request, tuple[int, ...]] = {}
    token_worth_ms = streams_ms / max(1, len(wanted))
    for request, num_tokens in wanted:
        most = min(MAX_DRAFTS, request.max_drafts, room.tokens)
        behind = num_tokens < request.num_uncomputed_tokens
        if most < 1 or behind or request.num_computed_tokens < request.prefill_end:
            continue
        begin_ms = first_ms(room.model, request.num_tokens) if num_tokens == 1 else 0.0
        count, cost_ms = _worth(request, most, room, token_worth_ms, begin_ms)
        if count:
            chosen[request] = request.drafter.draft(count)
            room.tokens -= count
            room.ms -= cost_ms
    return chosen


def _worth(
    request: Request, most: int, room: Room, token_worth_ms: float, begin_ms: float
) -> tuple[int, float]:
    """How many drafts pay best, and what they cost: `begin_ms`, and each its own."""
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


def first_ms(model: StepTimeModel, past: int) -> float:
    """What a lone token takes more in a longer chunk, which reads its past as pairs too."""
    return model.pair_ms * past

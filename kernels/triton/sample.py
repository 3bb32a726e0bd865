"""From logits to tokens on the device: temperature, top-k, top-p, min-p, one draw per row.

The rules and the uniform numbers are those of `engine.execution.sampler`: filters apply in that
order to the renormalised survivors, ties fall to the lower id, and one number from the row's seed
and position picks by the inverse of the cumulative distribution, over falling logits where top-k
or top-p cut, else over rising ids. Nothing is sorted: thresholds are found by bisecting the bits of
a logit, whose order as integers is their order as numbers. Sums are float64 in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contract import ContractError
from kernels.triton.arguments import check

_BLOCK = 1024


@triton.jit
def _load(
    row: tl.tensor, start: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Ids, logits and their order as int32, [BLOCK]; -inf beyond the row."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row + column, mask=column < size, other=float("-inf"))
    return column, x, _order(x)


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit(order: tl.tensor) -> tl.tensor:
    """The inverse of `_order`."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor, least: tl.tensor) -> tl.tensor:
    """float64 exp((x - peak) / temperature), 0 below `least`."""
    weight = tl.exp((x - peak) / temperature)
    return tl.where(weight >= least, weight, 0.0).to(tl.float64)


@triton.jit
def _above(
    row: tl.tensor,
    size: tl.tensor,
    bound: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Mass and number of the logits whose order is above `bound`."""
    mass = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    count = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for start in range(0, size, BLOCK):
        column, x, order = _load(row, start, size, BLOCK)
        taken = (order > bound) & (column < size)
        mass += tl.sum(tl.where(taken, _weight(x, peak, temperature, least), 0.0), 0)
        count += tl.sum(taken.to(tl.int32), 0)
    return mass, count


@triton.jit
def _lowest(
    row: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    limit: tl.tensor,
    COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The lowest bound, from `low` on, above which number (COUNT) or mass is under the limit, or
    (not STRICT) equal to it."""
    high = _order(peak).to(tl.int64)
    low = low.to(tl.int64)
    for _ in range(33):
        middle = (low + high) >> 1
        mass, count = _above(row, size, middle.to(tl.int32), peak, temperature, least, BLOCK)
        value = count.to(tl.float64) if COUNT else mass
        under = value < limit if STRICT else value <= limit
        settled = low >= high
        high = tl.where(under | settled, tl.where(settled, high, middle), high)
        low = tl.where(under | settled, low, middle + 1)
    return high.to(tl.int32)


@triton.jit
def _equal(row: tl.tensor, size: tl.tensor, wanted: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """How many logits have that order."""
    count = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for start in range(0, size, BLOCK):
        column, _x, order = _load(row, start, size, BLOCK)
        count += tl.sum(((order == wanted) & (column < size)).to(tl.int32), 0)
    return count


@triton.jit
def _nth_equal(
    row: tl.tensor, size: tl.tensor, wanted: tl.tensor, nth: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Id of the nth logit, from 0, of that order by rising id; -1 where there are fewer."""
    count = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    found = tl.sum(tl.zeros([BLOCK], tl.int32), 0) - 1
    for start in range(0, size, BLOCK):
        column, _x, order = _load(row, start, size, BLOCK)
        same = ((order == wanted) & (column < size)).to(tl.int32)
        rank = count + tl.cumsum(same, 0)
        found = tl.maximum(found, tl.max(tl.where((same > 0) & (rank == nth + 1), column, -1), 0))
        count += tl.sum(same, 0)
    return found


@triton.jit
def _by_id(
    row: tl.tensor,
    size: tl.tensor,
    x_wanted: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first id at which the mass, summed by rising id, exceeds `x_wanted`; else the last id
    with any mass."""
    mass = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    found = tl.sum(tl.zeros([BLOCK], tl.int32), 0) + 2147483647
    last = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for start in range(0, size, BLOCK):
        column, x, _order_of = _load(row, start, size, BLOCK)
        weight = tl.where(column < size, _weight(x, peak, temperature, least), 0.0)
        past = (mass + tl.cumsum(weight, 0) > x_wanted) & (weight > 0.0)
        found = tl.minimum(found, tl.min(tl.where(past, column, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, column, 0), 0))
        mass += tl.sum(weight, 0)
    return tl.where(found == 2147483647, last, found)


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """float64 in [0, 1): SplitMix64 over the seed, then over that and the position."""
    step = (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    return (_mix(_mix(seed.to(tl.uint64)) + step) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def sample_kernel(
    logits: tl.tensor,
    real_params: tl.tensor,
    top_k: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows). real_params: float64 [R, 3] of temperature, top-p and min-p."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * size
    peak = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), 0)
    num_nan = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    for start in range(0, size, BLOCK):
        _column, x, _order_of = _load(row, start, size, BLOCK)
        num_nan += tl.sum((x != x).to(tl.int32), 0)
        peak = tl.maximum(peak, tl.max(x, 0))
    usable = (num_nan == 0) & (peak > float("-inf")) & (peak < float("inf"))
    peak = tl.where(usable, peak, 0.0)
    warm = tl.load(real_params + index * 3)
    top_p, min_p = tl.load(real_params + index * 3 + 1), tl.load(real_params + index * 3 + 2)
    k = tl.load(top_k + index)
    token = tl.sum(tl.zeros([BLOCK], tl.int32), 0) - 1
    if usable:
        if warm == 0.0:
            token = _nth_equal(row, size, _order(peak), 0, BLOCK)
        else:
            uniform = _uniform(tl.load(seeds + index), tl.load(positions + index))
            token = _draw(
                row, size, peak, warm.to(tl.float32), k, top_p, min_p.to(tl.float32), uniform,
                BLOCK,
            )  # fmt: skip
    tl.store(tokens + index, token)


@triton.jit
def _draw(
    row: tl.tensor,
    size: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    cut = (k > 0) & (k < size)
    bound = _order(peak) * 0 - 2147483647
    ties = bound * 0
    if cut:
        bound = _lowest(
            row, size, bound, peak, temperature, 0.0, k.to(tl.float64), True, True, BLOCK
        )
        mass, count = _above(row, size, bound, peak, temperature, 0.0, BLOCK)
        ties = k - count
    if top_p < 1.0:
        mass, count = _above(row, size, bound, peak, temperature, 0.0, BLOCK)
        total = mass + ties * _weight(_logit(bound), peak, temperature, 0.0)
        nucleus = _lowest(
            row, size, bound, peak, temperature, 0.0, top_p * total, False, True, BLOCK
        )
        mass, count = _above(row, size, nucleus, peak, temperature, 0.0, BLOCK)
        weight = _weight(_logit(nucleus), peak, temperature, 0.0)
        room = tl.maximum(tl.ceil((top_p * total - mass) / weight), 1.0)
        same = _equal(row, size, nucleus, BLOCK)
        most = tl.where(cut & (nucleus == bound), ties, same)
        ties = tl.minimum(room, most.to(tl.float64)).to(tl.int32)
        bound = nucleus
    mass, count = _above(row, size, bound, peak, temperature, min_p, BLOCK)
    token = bound * 0
    if cut | (top_p < 1.0):
        total = mass + ties * _weight(_logit(bound), peak, temperature, min_p)
        wanted = tl.minimum(uniform * total, total * (1.0 - 2.0**-52))
        place = _lowest(row, size, bound, peak, temperature, min_p, wanted, False, False, BLOCK)
        mass, count = _above(row, size, place, peak, temperature, min_p, BLOCK)
        weight = _weight(_logit(place), peak, temperature, min_p)
        same = tl.where(place == bound, ties, _equal(row, size, place, BLOCK))
        nth = tl.minimum(((wanted - mass) / weight).to(tl.int32), same - 1)
        token = _nth_equal(row, size, place, nth, BLOCK)
    else:
        token = _by_id(row, size, uniform * mass, peak, temperature, min_p, BLOCK)
    return token


def sample(
    logits: Tensor,
    real_params: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
) -> None:
    """tokens int32 [R] from logits float32 [R, vocab]; -1 for a row that is not finite.

    real_params: float64 [R, 3] of temperature (0: the largest logit), top-p and min-p. top_k: int32
    [R], 0 for none. seeds: int64 [R], the bits of unsigned seeds. positions: int32 [R], those that
    the new tokens will have. Raises ContractError naming an argument.
    """
    check("logits", logits, (-1, -1), torch.float32)
    num_rows, size = logits.shape
    check("real_params", real_params, (num_rows, 3), torch.float64)
    check("top_k", top_k, (num_rows,), torch.int32)
    check("seeds", seeds, (num_rows,), torch.int64)
    check("positions", positions, (num_rows,), torch.int32)
    check("tokens", tokens, (num_rows,), torch.int32)
    if size == 0:
        raise ContractError("logits: rows of no logits")
    if num_rows:
        sample_kernel[(num_rows,)](
            *(logits, real_params, top_k, seeds, positions, tokens, size),
            BLOCK=_BLOCK,
            num_warps=8,
        )

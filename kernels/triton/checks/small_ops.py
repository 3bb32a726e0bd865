"""The fused small ops against the reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.contract import KVDType, KVLayout
from kernels.triton.copy_pages import copy_pages
from kernels.triton.gather_rows import gather_rows
from kernels.triton.merge_states import merge_states
from kernels.triton.operands import Heads, States
from kernels.triton.pool import TritonKVPool
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope_write import rope_write
from kernels.triton.silu_mul import silu_mul

_ROUNDING: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The largest error, and what it may be."""

    error: float
    bound: float

    @property
    def good(self) -> bool:
        """NaN is not."""
        return self.error <= self.bound


def check_rms_norm(dtype: torch.dtype, device: torch.device, size: int = 96) -> Outcome:
    """With and without a branch; the residual is changed in place."""
    torch.manual_seed(size)
    residual, weight = torch.randn(3, size), torch.randn(size)
    branch = torch.randn(3, size).to(dtype)
    worst = 0.0
    for added in (None, branch):
        held = residual.clone().to(device)
        out = torch.full((3, size), torch.nan, dtype=dtype, device=device)
        rms_norm(held, None if added is None else added.to(device), weight.to(device), out, 1e-5)
        total = residual if added is None else residual + added.float()
        worst = max(worst, _error(held, total))
        worst = max(worst, _error(out, reference.rms_norm(total, weight, 1e-5)))
    return Outcome(worst, _ROUNDING[dtype])


def check_silu_mul(dtype: torch.dtype, device: torch.device, size: int = 1100) -> Outcome:
    torch.manual_seed(size)
    gate_up = (3 * torch.randn(3, 2 * size)).to(dtype)
    out = torch.full((3, size), torch.nan, dtype=dtype, device=device)
    silu_mul(gate_up.to(device), out)
    gate, up = gate_up.float().chunk(2, dim=1)
    return Outcome(_error(out, reference.silu_mul(gate, up)), _ROUNDING[dtype])


def check_gather_rows(dtype: torch.dtype, device: torch.device, size: int = 1100) -> Outcome:
    torch.manual_seed(size)
    table = torch.randn(7, size).to(dtype)
    ids = torch.tensor([6, 0, 3, 3], dtype=torch.int32)
    out = torch.full((4, size), torch.nan, device=device)
    gather_rows(table.to(device), ids.to(device), out, debug=True)
    return Outcome(_error(out, table[ids.long()].float()), 0.0)


def check_copy_pages(dtype: torch.dtype, device: torch.device, size: int = 2600) -> Outcome:
    """Two copies from one page; pages that are no destination stay."""
    torch.manual_seed(size)
    pool = torch.randn(6, size).to(dtype).to(device)
    pairs = torch.tensor([[4, 0], [2, 5], [4, 1]], dtype=torch.int32, device=device)
    wanted = pool[[4, 4, 2, 3, 4, 2]].float().cpu()
    copy_pages(pool, pairs, debug=True)
    return Outcome(_error(pool, wanted), 0.0)


def check_merge_states(dtype: torch.dtype, device: torch.device, size: int = 80) -> Outcome:
    """Against a sum in float64, states without keys among them."""
    torch.manual_seed(size)
    heads = Heads(10, 5, size)
    states = States(torch.randn(6, 10, size), 20 * torch.randn(6, 10))
    states.lse[2] = -torch.inf
    states.out[2] = 0.0
    counts = ((1, 0, 1), (0, 1, 4), (2, 5, 1))
    out = torch.full((3, 10, size), torch.nan, dtype=dtype, device=device)
    on_device = States(states.out.to(device), states.lse.to(device))
    merge_states(on_device, torch.tensor(counts, dtype=torch.int32, device=device), out, heads)
    wanted = torch.empty(3, 10, size)
    for token, first, count in counts:
        part = slice(first, first + count)
        share = (states.lse[part].double() * np.log(2)).softmax(dim=0)
        wanted[token] = (share[..., None] * states.out[part]).sum(dim=0)
    return Outcome(_error(out, wanted), _ROUNDING[dtype])


def check_rope_write(
    dtype: torch.dtype,
    device: torch.device,
    *,
    stored: KVDType,
    head_dim: int = 64,
    half: int = 32,
    norms: bool = True,
    page_size: int = 16,
) -> Outcome:
    """Queries, and every slot of the pool: the new tokens' hold what the reference computes, to
    the rounding of the pages' dtype, and the others what they held."""
    torch.manual_seed(head_dim + half)
    heads = Heads(6, 2, head_dim)
    qkv = torch.randn(4, 10 * head_dim).to(dtype)
    angle = 6 * torch.rand(4, half)
    cos, sin = angle.cos(), angle.sin()
    q_norm = 1 + 0.2 * torch.randn(head_dim) if norms else None
    k_norm = 1 + 0.2 * torch.randn(head_dim) if norms else None
    slots = torch.tensor([3 * page_size + 1, -1, 7, 2 * page_size - 1], dtype=torch.int32)
    layout = KVLayout(2, 2, head_dim, page_size, stored)
    pool = TritonKVPool.allocate(layout, 4, device)
    for part in pool.parts:
        part.view(torch.uint8).random_(0, 256)
    before = [part.cpu().clone() for part in pool.parts]
    q_out = torch.full((4, 6, head_dim), torch.nan, dtype=dtype, device=device)
    rope_write(
        qkv.to(device),
        cos.to(device),
        sin.to(device),
        None if q_norm is None else q_norm.to(device),
        None if k_norm is None else k_norm.to(device),
        slots.to(device),
        q_out,
        pool.layers[1],
        heads,
        1e-5,
        debug=True,
    )
    x = qkv.float().view(4, 10, head_dim)
    q, k, v = x[:, :6], x[:, 6:8], x[:, 8:]
    if q_norm is not None and k_norm is not None:
        q, k = reference.rms_norm(q, q_norm, 1e-5), reference.rms_norm(k, k_norm, 1e-5)
    q, k = (reference.rope(part, cos[:, None], sin[:, None]) for part in (q, k))
    worst = _error(q_out, q) / _ROUNDING[dtype]
    return Outcome(max(worst, _pool_error(pool, before, slots, k, v)), 1.0)


def _pool_error(
    pool: TritonKVPool, before: list[Tensor], slots: Tensor, k: Tensor, v: Tensor
) -> float:
    """The largest error of what was written in units of the storage's rounding; infinite where
    another slot changed."""
    size, stored = pool.layout.page_size, pool.layout.dtype
    new = slots >= 0
    page, offset = slots[new].long() // size, slots[new].long() % size
    untouched = torch.ones((pool.num_pages, 2, 2, 2, size), dtype=torch.bool)
    untouched[page, 1, :, :, offset] = False
    for part, old in zip(pool.parts, before, strict=True):
        same = (part.cpu().view(torch.uint8) == old.view(torch.uint8)).view(*untouched.shape, -1)
        if not bool(same.all(dim=-1)[untouched].all()):
            return float("inf")
    worst = 0.0
    for which, x in enumerate((k[new], v[new])):
        held = pool.pages.cpu()[page, 1, which, :, offset]
        if pool.scales is None:
            step = {KVDType.F32: 1e-5, KVDType.F16: 1e-3, KVDType.BF16: 8e-3}[stored]
            worst = max(worst, float(((held.float() - x).abs() / (step * (1 + x.abs()))).max()))
            continue
        scale = pool.scales.cpu()[page, 1, which, :, offset]
        codes, wanted_scale = reference.quantise(x, stored)
        worst = max(worst, float((scale / wanted_scale - 1).abs().max()) / 1e-5)
        # halves may round to either neighbour: one step of int8, one unit of the mantissa
        step = {KVDType.I8: 1.01, KVDType.E4M3: 0.126, KVDType.E5M2: 0.251}[stored]
        got = held.view(codes.dtype).float()
        size_of = torch.ones_like(got) if stored is KVDType.I8 else codes.float().abs() + 2.0**-6
        worst = max(worst, float(((got - codes.float()).abs() / (step * size_of)).max()))
        exact = (got == codes.float()).float().mean()
        worst = max(worst, float("inf") if exact < 0.99 else 0.0)
    return worst


def _error(got: Tensor, wanted: Tensor) -> float:
    """Largest error of a row relative to its length; infinite where anything is NaN."""
    x = got.float().cpu()
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    return float(((x - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


ELEMENTWISE: Final[Mapping[str, Callable[..., Outcome]]] = MappingProxyType(
    {
        "rms_norm": check_rms_norm,
        "silu_mul": check_silu_mul,
        "gather_rows": check_gather_rows,
        "copy_pages": check_copy_pages,
        "merge_states": check_merge_states,
    }
)
"""Checks that take a dtype, a device and a size."""

"""How long the kernels take on a GPU, beside this device's own peaks and torch's attention.

Each row: time, the bytes or operations that cannot be avoided over it, and their share of the copy
bandwidth or matrix rate measured in the same run. Inputs are random and larger than the caches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.contract import DecoderSpec, KVDType, WeightType
from kernels.roofline import BatchShape, WeightBytes, op_costs
from kernels.triton.arguments import interpreted
from kernels.triton.attention import BatchAttention, Tiles, upload
from kernels.triton.checks.grid import AttentionCase
from kernels.triton.checks.operands import Lengths, Operands, build
from kernels.triton.copy_pages import copy_pages
from kernels.triton.rms_norm import rms_norm
from kernels.triton.sample import sample
from kernels.triton.silu_mul import silu_mul

_BF16: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed: on a GPU sizes that fill it, in the interpreter some that end."""

    batch: int
    context: int
    prompt: int
    branches: int
    shared: int
    rows: int
    hidden: int
    copy_bytes: int
    matrix: int


FULL: Final = Sizes(16, 8192, 16384, 64, 16384, 8192, 4096, 4 << 30, 8192)
REDUCED: Final = Sizes(2, 64, 32, 3, 256, 2, 64, 1 << 20, 64)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes per second of a copy, read and written ones counted, and bfloat16 operations per
    second of a matrix product."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `target` is the share that is wanted, 0 for none."""

    name: str
    seconds: float
    num_bytes: float = 0.0
    flops: float = 0.0
    target: float = 0.0


def measure_peaks(device: torch.device, sizes: Sizes) -> Peaks:
    source = torch.randn(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source))
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(_BF16) for _ in range(2))
    product_s = seconds(lambda: a @ b)
    return Peaks(2 * source.nbytes / copy_s, 2 * sizes.matrix**3 / product_s)


def seconds(call: Callable[[], object]) -> float:
    """Median over repeated calls; in the interpreter that of one call."""
    if interpreted():
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    return float(triton.testing.do_bench(call, return_mode="median")) / 1e3


def attention_rows(device: torch.device, capability: int, sizes: Sizes) -> Iterator[Row]:
    """Decode, prefill and cascade, and what torch has for the first two."""
    lens = [(1, sizes.context)] * sizes.batch
    for page_size, stored in ((16, KVDType.BF16), (64, KVDType.BF16), (16, KVDType.E4M3)):
        case = AttentionCase(("decode", 0), 8, page_size, 128, (_BF16, stored), 0.0, 0)
        operands = build(case, lens, 0, device, num_kv_heads=8)
        name = f"decode {sizes.batch} x {sizes.context}, 64:8 heads, page {page_size}, {stored}"
        num_bytes, _ = attention_costs(operands, lens)
        yield Row(name, _timed(operands, capability), num_bytes=num_bytes, target=0.85)
        if page_size == 64:
            yield from _torch_rows(operands, "decode", num_bytes=num_bytes)
    lens = [(sizes.prompt, sizes.prompt)]
    case = AttentionCase(("mixed", 0), 4, 16, 128, (_BF16, KVDType.BF16), 0.0, 0)
    operands = build(case, lens, 0, device, num_kv_heads=8)
    _, flops = attention_costs(operands, lens)
    name = f"prefill {sizes.prompt}, 32:8 heads, page 16, bf16"
    yield Row(name, _timed(operands, capability), flops=flops, target=0.6)
    yield from _torch_rows(operands, "prefill", flops=flops)


def cascade_ratio(device: torch.device, capability: int, sizes: Sizes) -> tuple[float, float]:
    """Seconds of branches over one shared prefix, read once, and by plain decode."""
    case = AttentionCase(("cascade", 0), 4, 16, 128, (_BF16, KVDType.BF16), 0.0, 0)
    lens = [(1, sizes.shared + 17 + branch) for branch in range(sizes.branches)]
    operands = build(case, lens, sizes.shared // 16, device, num_kv_heads=8)
    return _timed(operands, capability), _timed(operands, capability, cascade=False)


def small_rows(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Ops that move memory: every input read once, every output written once."""
    shape = (sizes.rows, sizes.hidden)
    residual, weight = torch.randn(shape, device=device), torch.ones(sizes.hidden, device=device)
    branch = torch.randn(shape, device=device).to(_BF16)
    out = torch.empty_like(branch)
    moved = 2 * residual.nbytes + branch.nbytes + out.nbytes
    took = seconds(lambda: rms_norm(residual, branch, weight, out, 1e-5))
    yield Row(f"residual + rms_norm {shape}", took, num_bytes=moved)
    gate_up = torch.randn((sizes.rows, 4 * sizes.hidden), device=device).to(_BF16)
    gated = torch.empty((sizes.rows, 2 * sizes.hidden), dtype=_BF16, device=device)
    took = seconds(lambda: silu_mul(gate_up, gated))
    yield Row(f"silu_mul {tuple(gated.shape)}", took, num_bytes=gate_up.nbytes + gated.nbytes)
    pool = torch.randn((sizes.rows, 32 * sizes.hidden), device=device)
    half = sizes.rows // 2
    first = torch.arange(half, dtype=torch.int32, device=device)
    pairs = torch.stack([first, first + half], dim=1)
    took = seconds(lambda: copy_pages(pool, pairs))
    yield Row(f"copy_pages {half}", took, num_bytes=2 * pool[:half].nbytes)
    logits = torch.randn((sizes.batch, 32 * sizes.hidden), device=device)
    took = seconds(_sampling(logits, device))
    yield Row(f"sample top-p {tuple(logits.shape)}", took, num_bytes=logits.nbytes)


def _sampling(logits: Tensor, device: torch.device) -> Callable[[], None]:
    num_rows = len(logits)
    params = torch.tensor([[1.0, 0.9, 0.0]] * num_rows, dtype=torch.float64, device=device)
    ints = torch.zeros(num_rows, dtype=torch.int32, device=device)
    seeds = torch.arange(num_rows, dtype=torch.int64, device=device)
    tokens = torch.empty_like(ints)
    return lambda: sample(logits, params, ints, seeds, ints, tokens)


def _timed(operands: Operands, capability: int, *, cascade: bool = True) -> float:
    """Seconds of all attention kernels of one layer; the plan is made before."""
    batch, q = operands.batch, operands.q
    table, positions = upload([batch.page_table, batch.positions], q.device)
    layout = operands.pool.layout
    tiles = Tiles.choose(operands.heads, q.dtype, layout.dtype, capability)
    attention = BatchAttention(
        batch,
        table,
        positions,
        layout.page_size,
        operands.heads,
        tiles,
        cascade=cascade,
        debug=False,
    )
    out, pages = torch.empty_like(q), operands.pool.layers[0]
    return seconds(lambda: attention.run(q, pages, out))


def attention_costs(operands: Operands, lens: Lengths) -> tuple[float, float]:
    """Bytes and operations of one layer's attention, as `kernels.roofline` counts them."""
    heads, layout = operands.heads, operands.pool.layout
    spec = DecoderSpec(
        *("llama", 1, 16, 16, heads.num_heads, heads.num_kv_heads, heads.head_dim),
        vocab_size=16,
        max_context=1 << 20,
        norm_eps=1e-5,
        rope_inv_freq=(),
    )
    weights = WeightBytes.stored_as(spec, lambda name: WeightType.BF16)
    shape = BatchShape(tuple(lens), 0)
    cost = op_costs(spec, shape, weights, layout, activation_itemsize=2)["attention"]
    return cost.memory_bytes + cost.activation_bytes, cost.flops


def _torch_rows(
    operands: Operands, what: str, *, num_bytes: float = 0.0, flops: float = 0.0
) -> Iterator[Row]:
    """SDPA and FlexAttention over the same keys, contiguous and without pages."""
    device, num_sequences = operands.q.device, len(operands.keys)
    keys, values = (
        torch.stack(held).to(device, _BF16) for held in (operands.keys, operands.values)
    )
    q = operands.q.view(num_sequences, -1, *operands.q.shape[1:]).transpose(1, 2).contiguous()
    prefill = what == "prefill"
    options: dict[str, Any] = {"is_causal": prefill, "enable_gqa": True}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    took = seconds(lambda: sdpa(q, keys, values, **options))
    yield Row(f"  torch SDPA {what}", took, num_bytes, flops)
    compiled: Any = flex_attention if interpreted() else torch.compile(flex_attention)
    mask = None
    if prefill:
        length = keys.shape[2]
        mask = create_block_mask(_causal, None, None, length, length, device=str(device))
    try:
        took = seconds(lambda: compiled(q, keys, values, block_mask=mask, enable_gqa=True))
    except Exception as fault:  # of its compiler: ours is still to be timed
        yield Row(f"  torch FlexAttention {what}: {fault!r}"[:52], float("nan"))
        return
    yield Row(f"  torch FlexAttention {what}", took, num_bytes, flops)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key

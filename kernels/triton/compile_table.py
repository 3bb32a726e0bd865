"""The variants of all kernels that are compiled ahead of time, as the launchers ask for them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton

from kernels.contract import KVDType
from kernels.triton.attention import Tiles
from kernels.triton.cascade_attention import cascade_attention_kernel
from kernels.triton.copy_pages import copy_pages_kernel
from kernels.triton.decode_attention import decode_attention_kernel
from kernels.triton.gather_rows import gather_rows_kernel
from kernels.triton.merge_states import merge_states_kernel
from kernels.triton.operands import Heads
from kernels.triton.prefill_attention import prefill_attention_kernel
from kernels.triton.rms_norm import rms_norm_kernel
from kernels.triton.rope_write import heads_per_program, rope_write_kernel
from kernels.triton.sample import sample_kernel
from kernels.triton.silu_mul import silu_mul_kernel
from kernels.triton.tuning import Tile

_TYPES: Final = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_STORED: Final = {
    KVDType.F32: "*fp32",
    KVDType.F16: "*fp16",
    KVDType.BF16: "*bf16",
    KVDType.I8: "*i8",
    KVDType.E4M3: "*u8",
    KVDType.E5M2: "*u8",
}
_FLOATS: Final = ("score_scale", "softcap", "eps", "largest")
_FLOAT_POINTERS: Final = (
    *("key_scales", "value_scales", "partial_out", "partial_lse"),
    *("residual", "weight", "cos", "sin", "q_norm", "k_norm", "logits"),
)
_INT_POINTERS: Final = (
    *("page_table", "positions", "items", "first_states", "members", "slots", "ids", "pairs"),
    *("pool", "top_k", "tokens"),
)
_ALIGNED: Final = ("page_stride", "scale_stride", "size", "num_words")


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation. `wide`: the kernel is bound by memory and must load 16 bytes at a time.
    `shown`: representative of its kernel, compiled in the fast tests too.

    tolerated_stack_bytes: float32 chunks of heads beyond 128, which only the exact mode has, keep
    a few registers in memory with every tile that was tried.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    wide: bool
    shown: bool
    tolerated_stack_bytes: int = 0


def variants(capability: int) -> Iterator[Variant]:
    """All of them, for an architecture of 10 · major + minor."""
    yield from _attention(capability)
    yield from _small_ops()


def _attention(capability: int) -> Iterator[Variant]:
    bf16, fp16 = torch.bfloat16, torch.float16
    shapes = [(Heads(8, 1, dim), bf16, KVDType.BF16, 16) for dim in (64, 80, 96, 128, 256)]
    shapes += [(Heads(8, 1, 128), bf16, dtype, 16) for dtype in KVDType if dtype.scaled]
    shapes += [
        (Heads(4, 1, 128), fp16, KVDType.F16, 64),
        (Heads(3, 1, 64), fp16, KVDType.E4M3, 32),
        (Heads(1, 1, 256), bf16, KVDType.I8, 64),
        (Heads(32, 1, 128), bf16, KVDType.BF16, 32),
        (Heads(4, 1, 256, softcap=50.0), bf16, KVDType.BF16, 16),
        (Heads(4, 1, 64), torch.float32, KVDType.F32, 16),
        (Heads(4, 1, 128), torch.float32, KVDType.F32, 16),
        (Heads(4, 1, 256), torch.float32, KVDType.F32, 16),
    ]
    for heads, dtype, stored, page_size in shapes:
        tiles = Tiles.choose(heads, dtype, stored, capability)
        by_kernel = {
            decode_attention_kernel: tiles.decode,
            prefill_attention_kernel: tiles.prefill,
            cascade_attention_kernel: tiles.prefill,
        }
        for kernel, tile in by_kernel.items():
            shown = heads == Heads(8, 1, 128) and stored is KVDType.BF16
            shown |= heads.group == 3 and kernel is decode_attention_kernel
            one = _attention_variant(kernel, tile, heads, dtype, stored, page_size, shown)
            wide_exact = heads.head_dim > 128 and dtype is torch.float32
            yield replace(one, tolerated_stack_bytes=16) if wide_exact else one
        constants = {"D": heads.head_dim, "PAD": heads.padded_dim, "HEADS": 8}
        if page_size == 16 and stored is KVDType.BF16:
            label, shown = f"d{heads.head_dim}", heads.head_dim == 128
            yield _variant(merge_states_kernel, label, constants, dtype, stored, shown=shown)


def _attention_variant(
    kernel: Any,
    tile: Tile,
    heads: Heads,
    dtype: torch.dtype,
    stored: KVDType,
    page_size: int,
    shown: bool,
) -> Variant:
    constants = {
        "GROUP": heads.group,
        "D": heads.head_dim,
        "PAD": heads.padded_dim,
        "PAGE": page_size,
        "KV": stored.value,
        "SOFTCAP": heads.softcap != 0.0,
        "UPCAST": False,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
    }
    label = f"d{heads.head_dim} g{heads.group} page{page_size} {_TYPES[dtype][1:]}/{stored.value}"
    label += " softcap" if heads.softcap else ""
    return _variant(
        kernel,
        label,
        constants,
        dtype,
        stored,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        wide=kernel is decode_attention_kernel,
        shown=shown,
    )


def _small_ops() -> Iterator[Variant]:
    bf16 = torch.bfloat16
    for size in (576, 4096, 8192):
        padded = triton.next_power_of_2(size)
        constants = {"SIZE": size, "PAD": padded, "HAS_BRANCH": True}
        warps = 4 if padded <= 4096 else 8
        shown = size == 4096
        yield _variant(rms_norm_kernel, f"{size}", constants, bf16, num_warps=warps, shown=shown)
    block = {"BLOCK": 1024}
    yield _variant(silu_mul_kernel, "bf16", block, bf16)
    yield _variant(gather_rows_kernel, "bf16", block, bf16)
    yield _variant(copy_pages_kernel, "words", {"BLOCK": 4096}, bf16, num_warps=8)
    yield _variant(sample_kernel, "f32", block, bf16, num_warps=8, shown=False)
    for dim, half, stored in (
        *((dim, dim // 2, KVDType.BF16) for dim in (64, 80, 96, 128, 256)),
        *((128, 64, dtype) for dtype in KVDType if dtype.scaled),
        (80, 16, KVDType.I8),
    ):
        constants = {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "D": dim,
            "HALF": half,
            "HALF_PAD": triton.next_power_of_2(half),
            "REST_PAD": triton.next_power_of_2(max(1, dim - 2 * half)),
            "PAGE": 16,
            "KV": stored.value,
            "Q_NORM": True,
            "K_NORM": True,
            "HEADS": heads_per_program(triton.next_power_of_2(half)),
        }
        label = f"d{dim} rotary{2 * half} {stored.value}"
        yield _variant(
            rope_write_kernel,
            label,
            constants,
            bf16,
            stored,
            num_warps=1,
            shown=dim == 128 and not stored.scaled,
        )


def _variant(
    kernel: Any,
    label: str,
    constants: Mapping[str, object],
    dtype: torch.dtype,
    stored: KVDType = KVDType.BF16,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    wide: bool = True,
    shown: bool = True,
) -> Variant:
    kind = _kinds(kernel, dtype, stored)
    signature = {
        name: "constexpr" if name in constants else kind(name) for name in kernel.arg_names
    }
    aligned = tuple(
        name for name, type_ in signature.items() if type_.startswith("*") or name in _ALIGNED
    )
    name = f"{kernel.__name__.removesuffix('_kernel')} {label}"
    return Variant(
        name, kernel, signature, dict(constants), aligned, num_warps, num_stages, wide, shown
    )


def _kinds(kernel: Any, dtype: torch.dtype, stored: KVDType) -> Callable[[str], str]:
    def kind(name: str) -> str:
        if name in ("keys", "values"):
            return _STORED[stored]
        if name in ("q", "qkv", "q_out", "branch", "gate_up", "table"):
            return _TYPES[dtype]
        if name == "out":
            return "*fp32" if kernel is gather_rows_kernel else _TYPES[dtype]
        if name in _FLOAT_POINTERS:
            return "*fp32"
        if name in ("real_params", "seeds"):
            return "*fp64" if name == "real_params" else "*i64"
        if name in _INT_POINTERS:
            return "*i32"
        return "fp32" if name in _FLOATS else "i32"

    return kind

"""The judge of every backend: the whole contract in plain torch, float32, one function per op."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.contract import (
    ContractError,
    DecoderSpec,
    DecoderWeights,
    ForwardBatch,
    Int32Array,
    KVDType,
    KVLayout,
    StepLogits,
    Weight,
    check_batch,
    do_nothing,
)
from kernels.dequantise import dequantise
from kernels.weight_shapes import check_weights, layer_weights

_KV_DTYPES = {
    KVDType.F32: torch.float32,
    KVDType.F16: torch.float16,
    KVDType.BF16: torch.bfloat16,
    KVDType.I8: torch.int8,
    KVDType.E4M3: torch.float8_e4m3fn,
    KVDType.E5M2: torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """Dequantised weights; `layers` maps the fields of `LayerWeights` that a layer has."""

    spec: DecoderSpec
    embedding: Tensor
    layers: tuple[Mapping[str, Tensor], ...]
    final_norm: Tensor
    head: Tensor

    @property
    def weight_bytes(self) -> int:
        tensors = [self.embedding, self.final_norm, self.head]
        tensors += [tensor for layer in self.layers for tensor in layer.values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@dataclass(frozen=True, slots=True)
class ReferenceKVPool:
    """`pages` is [num_pages, num_layers, K|V, num_kv_heads, page_size, head_dim]; `scales`, float32
    without the last dimension, is None where the dtype has none."""

    layout: KVLayout
    pages: Tensor
    scales: Tensor | None = None

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]


class ReferenceBackend:
    """Slow and exact. `threads` is for the whole process, 0 leaves torch's own choice."""

    name = "reference"
    numeric_mode = "reference-f32"
    kv_dtype = KVDType.F16

    def __init__(self, threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)

    def free_device_bytes(self) -> int | None:
        """Pages lie in the machine's memory."""
        return None

    def load(self, spec: DecoderSpec, weights: DecoderWeights) -> ReferenceModel:
        """Dequantise everything once. Raises ContractError naming a weight that does not fit."""
        check_weights(spec, weights)
        embedding = _tensor(weights.embedding)
        return ReferenceModel(
            spec,
            embedding=embedding,
            layers=tuple(
                {name: _tensor(weight) for name, weight in layer_weights(layer).items()}
                for layer in weights.layers
            ),
            final_norm=_tensor(weights.final_norm),
            head=embedding if weights.head is None else _tensor(weights.head),
        )

    def alloc_kv(self, layout: KVLayout, num_pages: int) -> ReferenceKVPool:
        """Pages full of NaN, so that a read of what was never written shows. Raises MemoryError."""
        shape = (
            *(num_pages, layout.num_layers, 2),
            *(layout.num_kv_heads, layout.page_size, layout.head_dim),
        )
        try:
            if not layout.dtype.scaled:
                pages = torch.full(shape, torch.nan, dtype=_KV_DTYPES[layout.dtype])
                return ReferenceKVPool(layout, pages)
            codes = torch.zeros(shape, dtype=_KV_DTYPES[layout.dtype])
            return ReferenceKVPool(layout, codes, torch.full(shape[:-1], torch.nan))
        except RuntimeError as error:
            raise MemoryError(f"no memory for {num_pages} pages: {error}") from error

    def copy_pages(self, kv: ReferenceKVPool, src: Int32Array, dst: Int32Array) -> None:
        """Copy page src[i] to dst[i]."""
        if src.shape != dst.shape or np.intersect1d(src, dst).size:
            raise ContractError("copy_pages: src and dst differ in length or share a page")
        to, start = _index(_page_ids(kv, dst)), _index(_page_ids(kv, src))
        for held in _parts(kv):
            held[to] = held[start]

    def export_page(self, kv: ReferenceKVPool, page: int) -> bytes:
        """The page as [layer, K|V, kv_head, slot, head_dim], which is the pool's own order, then
        its scales."""
        _page_ids(kv, np.array([page], dtype=np.int32))
        return b"".join(held[page].view(torch.uint8).numpy().tobytes() for held in _parts(kv))

    def import_page(self, kv: ReferenceKVPool, page: int, data: bytes) -> None:
        """The inverse of `export_page`."""
        _page_ids(kv, np.array([page], dtype=np.int32))
        if len(data) != kv.layout.page_bytes:
            raise ContractError(f"a page is {kv.layout.page_bytes} bytes, not {len(data)}")
        raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        for held in _parts(kv):
            part, raw = raw[: held[page].nbytes], raw[held[page].nbytes :]
            held[page] = part.view(held.dtype).view(held.shape[1:])

    def prepare(self, model: ReferenceModel, kv: ReferenceKVPool, batch: ForwardBatch) -> None:
        """Check the batch."""
        check_batch(batch, model.spec, kv.layout, kv.num_pages)

    @torch.inference_mode()
    def step(
        self,
        model: ReferenceModel,
        kv: ReferenceKVPool,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        """Write K and V of the new tokens to their slots and return the logits asked for."""
        spec = model.spec
        check_batch(batch, spec, kv.layout, kv.num_pages)
        meanwhile()
        cos, sin = rope_table(spec, _index(batch.positions))
        x = model.embedding[_index(batch.token_ids)]
        for layer, weights in enumerate(model.layers):
            normed = rms_norm(x, weights["attn_norm"], spec.norm_eps)
            q, k, v = _qkv(spec, weights, normed)
            q, k = rope(q, cos, sin), rope(k, cos, sin)
            _write(kv, layer, batch.slot_mapping, k, v)
            attended = _paged_attention(spec, kv, layer, batch, q)
            x = x + linear(attended, weights["o"], weights.get("o_bias"))
            normed = rms_norm(x, weights["mlp_norm"], spec.norm_eps)
            gate, up = linear(normed, weights["gate"]), linear(normed, weights["up"])
            x = x + linear(silu_mul(gate, up), weights["down"])
        wanted = rms_norm(x[_index(batch.logit_rows)], model.final_norm, spec.norm_eps)
        return _logits(linear(wanted, model.head), batch.num_top)

    def close(self) -> None:
        """Nothing is held."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) · weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] · weight [out, in]ᵀ + bias."""
    return torch.nn.functional.linear(x, weight, bias)


def rope_table(spec: DecoderSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, 1, rotary_dim / 2], of angles computed in float64."""
    inv_freq = torch.tensor(spec.rope_inv_freq, dtype=torch.float64)
    angle = positions.double()[:, None, None] * inv_freq
    return (angle.cos() * spec.rope_scale).float(), (angle.sin() * spec.rope_scale).float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim]: element i with i + rotary_dim / 2, the rest untouched."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def quantise(x: Tensor, dtype: KVDType) -> tuple[Tensor, Tensor]:
    """Codes of x [..., head_dim] in a scaled KV dtype, and float32 scales [...]."""
    scale = x.abs().amax(dim=-1) / dtype.largest
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (x / scale[..., None]).clamp(-dtype.largest, dtype.largest)
    if dtype is KVDType.I8:
        codes = codes.round()
    return codes.to(_KV_DTYPES[dtype]), scale


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, elementwise."""
    return torch.nn.functional.silu(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float = 0.0) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v over the visible keys, grouped heads.

    q [T, num_heads, D], k and v [num_kv_heads, L, D], visible bool [T, L]; result
    [T, num_heads · D]. Query head h reads kv head h // (num_heads / num_kv_heads). With a soft cap
    other than 0, scores are softcap · tanh(score / softcap).
    """
    num_tokens, num_heads, head_dim = q.shape
    grouped = q.view(num_tokens, k.shape[0], num_heads // k.shape[0], head_dim)
    scores = torch.einsum("tngd,nld->ngtl", grouped, k) * head_dim**-0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("ngtl,nld->tngd", weights, v).reshape(num_tokens, -1)


def _qkv(
    spec: DecoderSpec, weights: Mapping[str, Tensor], x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [T, heads, head_dim] before rope."""
    q, k, v = (
        linear(x, weights[name], weights.get(f"{name}_bias")).view(len(x), -1, spec.head_dim)
        for name in ("q", "k", "v")
    )
    if "q_norm" in weights:
        q = rms_norm(q, weights["q_norm"], spec.norm_eps)
    if "k_norm" in weights:
        k = rms_norm(k, weights["k_norm"], spec.norm_eps)
    return q, k, v


def _write(kv: ReferenceKVPool, layer: int, slots: Int32Array, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, num_kv_heads, head_dim] in the slots that are not -1."""
    slot = _index(slots)
    new = slot >= 0
    page, offset = slot[new] // kv.layout.page_size, slot[new] % kv.layout.page_size
    for part, x in enumerate((k[new], v[new])):
        if kv.scales is None:
            kv.pages[page, layer, part, :, offset] = x.to(kv.pages.dtype)
        else:
            codes, scale = quantise(x, kv.layout.dtype)
            kv.pages[page, layer, part, :, offset] = codes
            kv.scales[page, layer, part, :, offset] = scale


def _paged_attention(
    spec: DecoderSpec, kv: ReferenceKVPool, layer: int, batch: ForwardBatch, q: Tensor
) -> Tensor:
    """Attention of every sequence's new tokens over its pages, [T, num_heads · head_dim]."""
    page_size = kv.layout.page_size
    window = spec.sliding_window[layer] if spec.sliding_window else 0
    results = []
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = batch.cu_seqlens_q[sequence : sequence + 2].tolist()
        position = _index(batch.positions[begin:end])[:, None]
        first = max(0, int(position[0]) - window + 1) if window else 0
        first_page = first // page_size
        table = batch.page_table[sequence, first_page : -(-seq_len // page_size)]
        # [pages, K|V, heads, slots, D] -> [K|V, heads, keys, D], from the first visible key on
        held = _dequantised(kv, _index(table), layer).permute(1, 2, 0, 3, 4).flatten(2, 3)
        held = held[:, :, first - first_page * page_size : seq_len - first_page * page_size]
        key = torch.arange(first, seq_len)
        visible = key <= position
        if window:
            visible &= key > position - window
        results.append(attention(q[begin:end], held[0], held[1], visible))
    return torch.cat(results) if results else q.flatten(1)


def _dequantised(kv: ReferenceKVPool, pages: Tensor, layer: int) -> Tensor:
    """float32 [pages, K|V, num_kv_heads, page_size, head_dim] of one layer."""
    if kv.scales is None:
        return kv.pages[pages, layer].float()
    # torch indexes no 8-bit floats on the CPU: their bytes are picked
    codes = kv.pages.view(torch.uint8)[pages, layer].view(kv.pages.dtype)
    return codes.float() * kv.scales[pages, layer][..., None]


def _parts(kv: ReferenceKVPool) -> list[Tensor]:
    """What a page consists of, in the order of its export."""
    return [kv.pages] if kv.scales is None else [kv.pages, kv.scales]


def _logits(logits: Tensor, num_top: int) -> StepLogits:
    full = logits.numpy()
    if num_top == 0:
        return StepLogits(full)
    top = np.argsort(-full, axis=1, kind="stable")[:, :num_top].astype(np.int32)
    return StepLogits(
        full=None,
        top_ids=top,
        top_logits=np.take_along_axis(full, top, axis=1),
        logsumexp=logits.logsumexp(dim=1).numpy(),
    )


def _tensor(weight: Weight) -> Tensor:
    return torch.from_numpy(dequantise(weight))


def _index(ids: Int32Array) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _page_ids(kv: ReferenceKVPool, ids: Int32Array) -> Int32Array:
    if ids.size and (ids.min() < 0 or ids.max() >= kv.num_pages):
        raise ContractError(f"a page is outside the pool of {kv.num_pages}")
    return ids

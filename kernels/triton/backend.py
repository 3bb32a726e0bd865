"""The whole step on a GPU: Triton kernels, and cuBLAS for the matrix products."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.contract import (
    BackendUnavailable,
    ContractError,
    DecoderSpec,
    DecoderWeights,
    ForwardBatch,
    Int32Array,
    KVDType,
    KVLayout,
    StepLogits,
    check_batch,
    do_nothing,
)
from kernels.triton.arguments import interpreted
from kernels.triton.attention import BatchAttention, Tiles, upload
from kernels.triton.copy_pages import copy_pages
from kernels.triton.gather_rows import gather_rows
from kernels.triton.model import TritonLayer, TritonModel, load_model
from kernels.triton.operands import Heads
from kernels.triton.pool import LayerPages, TritonKVPool
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope_write import rope_write
from kernels.triton.silu_mul import silu_mul
from kernels.weight_shapes import check_weights

LEAST_CAPABILITY = 80


class TritonBackend:
    """Activations and weights in bfloat16 with sums in float32, or all in float32 (`exact`).

    `cascade` lets rows that share a prefix read it once; without it, attention and the fused ops
    give a row the same bits in every batch (the matrix products are cuBLAS's, which promises that
    only for equal shapes). `debug` checks pages and rows on the device as well. Weights of all
    types are dequantised at load.
    """

    name = "triton"

    def __init__(self, *, exact: bool = False, cascade: bool = True, debug: bool = False) -> None:
        """Raises BackendUnavailable without a GPU of compute capability 8.0 or newer."""
        self._dtype = torch.float32 if exact else torch.bfloat16
        self._cascade, self._debug = cascade, debug
        self._capability = 90
        if not interpreted():
            self._capability = _capability()
        self._device = torch.device("cpu" if interpreted() else "cuda")

    @property
    def numeric_mode(self) -> str:
        """By architecture, since instructions of other shapes add in another order."""
        dtype = "f32" if self._dtype is torch.float32 else "bf16"
        where = "interpreted" if interpreted() else f"sm{self._capability}"
        return f"triton-{where}-{dtype}" + ("" if self._cascade else "-invariant")

    @property
    def kv_dtype(self) -> KVDType:
        """That of the activations."""
        return KVDType.F32 if self._dtype is torch.float32 else KVDType.BF16

    def free_device_bytes(self) -> int | None:
        """What the GPU has left beside weights; None in the interpreter."""
        if interpreted():
            return None
        free, _ = torch.cuda.mem_get_info()
        return int(free)

    def load(self, spec: DecoderSpec, weights: DecoderWeights) -> TritonModel:
        """Dequantise and upload. Raises ContractError naming a weight that does not fit."""
        check_weights(spec, weights)
        return load_model(spec, weights, self._dtype, self._device)

    def alloc_kv(self, layout: KVLayout, num_pages: int) -> TritonKVPool:
        """Contents undefined. Raises ContractError for head sizes of odd alignment, MemoryError."""
        return TritonKVPool.allocate(layout, num_pages, self._device)

    def copy_pages(self, kv: TritonKVPool, src: Int32Array, dst: Int32Array) -> None:
        """Copy page src[i] to dst[i], all layers, in one launch for values and one for scales."""
        if src.shape != dst.shape or np.intersect1d(src, dst).size:
            raise ContractError("copy_pages: src and dst differ in length or share a page")
        for name, ids in (("src", src), ("dst", dst)):
            _check_pages(name, kv, ids)
        if np.unique(dst).size != dst.size:
            raise ContractError("copy_pages: dst names a page twice")
        (pairs,) = upload([np.stack([src, dst], axis=1).astype(np.int32)], self._device)
        for part in kv.parts:
            copy_pages(part, pairs, debug=self._debug)

    def export_page(self, kv: TritonKVPool, page: int) -> bytes:
        """The page as [layer, K|V, kv_head, slot, head_dim], which is the pool's own order, then
        its scales."""
        _check_pages("page", kv, np.array([page], dtype=np.int32))
        parts = (part[page].contiguous().view(torch.uint8).cpu() for part in kv.parts)
        return b"".join(part.numpy().tobytes() for part in parts)

    def import_page(self, kv: TritonKVPool, page: int, data: bytes) -> None:
        """The inverse of `export_page`."""
        _check_pages("page", kv, np.array([page], dtype=np.int32))
        if len(data) != kv.layout.page_bytes:
            raise ContractError(f"data: {len(data)} bytes, a page is {kv.layout.page_bytes}")
        raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        begin = 0
        for part in kv.parts:
            held = raw[begin : begin + part[page].nbytes]
            part[page] = held.view(part.dtype).view(part.shape[1:]).to(self._device)
            begin += part[page].nbytes

    def prepare(self, model: TritonModel, kv: TritonKVPool, batch: ForwardBatch) -> None:
        """Check the batch."""
        check_batch(batch, model.spec, kv.layout, kv.num_pages)

    @torch.inference_mode()
    def step(
        self,
        model: TritonModel,
        kv: TritonKVPool,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        """Write K and V of the new tokens to their slots and return the logits asked for."""
        spec = model.spec
        check_batch(batch, spec, kv.layout, kv.num_pages)
        sent = upload(
            [batch.token_ids, batch.positions, batch.slot_mapping, batch.page_table], self._device
        )
        token_ids, positions, slots, page_table = sent
        angle = positions.double()[:, None] * model.inv_freq
        cos = (angle.cos() * _rope_scale(spec)).float().contiguous()
        sin = (angle.sin() * _rope_scale(spec)).float().contiguous()
        windows = spec.sliding_window or (0,) * spec.num_layers
        attention = {
            window: self._plan(spec, batch, page_table, positions, kv.layout, window)
            for window in set(windows)
        }
        residual = torch.empty(
            (batch.token_ids.size, spec.hidden_size), dtype=torch.float32, device=self._device
        )
        gather_rows(model.embedding, token_ids, residual, debug=self._debug)
        branch: Tensor | None = None
        for weights, pages, window in zip(model.layers, kv.layers, windows, strict=True):
            normed = self._normed(residual, branch, weights.attn_norm, spec)
            q = self._write(spec, weights, pages, normed, cos, sin, slots)
            attended = torch.empty_like(q)
            attention[window].run(q, pages, attended)
            branch = _linear(attended.flatten(1), weights.o, weights.o_bias)
            normed = self._normed(residual, branch, weights.mlp_norm, spec)
            gate_up = _linear(normed, weights.gate_up)
            gated = gate_up.new_empty((len(gate_up), spec.intermediate_size))
            silu_mul(gate_up, gated)
            branch = _linear(gated, weights.down)
        (rows,) = upload([batch.logit_rows], self._device)
        branch = None if branch is None else branch[rows].contiguous()
        wanted = self._normed(residual[rows].contiguous(), branch, model.final_norm, spec)
        logits = _linear(wanted, model.head).float()
        meanwhile()
        return _logits(logits, batch.num_top)

    def close(self) -> None:
        """Nothing is held beside models and pools."""

    def _plan(
        self,
        spec: DecoderSpec,
        batch: ForwardBatch,
        page_table: Tensor,
        positions: Tensor,
        layout: KVLayout,
        window: int,
    ) -> BatchAttention:
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, window)
        tiles = Tiles.choose(heads, self._dtype, layout.dtype, self._capability)
        return BatchAttention(
            batch,
            page_table,
            positions,
            layout.page_size,
            heads,
            tiles,
            cascade=self._cascade,
            debug=self._debug,
        )

    def _normed(
        self, residual: Tensor, branch: Tensor | None, weight: Tensor, spec: DecoderSpec
    ) -> Tensor:
        out = torch.empty_like(residual, dtype=self._dtype)
        rms_norm(residual, branch, weight, out, spec.norm_eps)
        return out

    def _write(
        self,
        spec: DecoderSpec,
        weights: TritonLayer,
        pages: LayerPages,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Rotated queries [T, num_heads, head_dim]; keys and values go into their slots."""
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        qkv = _linear(x, weights.qkv, weights.qkv_bias)
        shape = (len(x), spec.num_heads, spec.head_dim)
        q = torch.empty(shape, dtype=self._dtype, device=self._device)
        norms = (weights.q_norm, weights.k_norm)
        rope_write(
            *(qkv, cos, sin, *norms, slots, q, pages, heads, spec.norm_eps), debug=self._debug
        )
        return q


def _capability() -> int:
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "torch sees no CUDA device; is it built for CUDA, and for this driver?"
        )
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < LEAST_CAPABILITY:
        raise BackendUnavailable(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; 8.0 is needed"
        )
    return 10 * major + minor


def _rope_scale(spec: DecoderSpec) -> float:
    return spec.rope_scale if spec.rope_inv_freq else 1.0


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] · weight [out, in]ᵀ + bias."""
    return torch.nn.functional.linear(x, weight, bias)


def _logits(logits: Tensor, num_top: int) -> StepLogits:
    """Full rows, or the largest by falling logit, ties by rising id, in order whatever sorts them:
    logit and id make one integer key."""
    if num_top == 0:
        return StepLogits(logits.cpu().numpy())
    bits = logits.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    top = ((ordered << 32) - ids).topk(num_top, dim=1, sorted=True).indices
    return StepLogits(
        full=None,
        top_ids=top.int().cpu().numpy(),
        top_logits=logits.gather(1, top).cpu().numpy(),
        logsumexp=logits.logsumexp(dim=1).cpu().numpy(),
    )


def _check_pages(name: str, kv: TritonKVPool, ids: Int32Array) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= kv.num_pages):
        raise ContractError(f"{name}: a page is outside the pool of {kv.num_pages}")

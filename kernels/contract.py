"""What a backend does: the types and laws every backend (reference, cpu, triton) keeps.

Arrays at this border are numpy arrays, C-contiguous, with the dtypes said below; a backend copies
them to wherever it computes. A *page* holds `page_size` consecutive token positions of one
sequence for all layers, K and V.

Laws:
  * `step` is a function of token ids, positions and page contents alone: how a prompt was chunked,
    what else is in the batch and which pages were cached never changes a row's logits. The CPU
    backend promises this bit for bit: attention is an ordered merge over key blocks of
    `KEY_BLOCK` positions that begin at multiples of `KEY_BLOCK`.
  * Slots at or beyond a sequence's `seq_lens` are garbage (NaN included) and are never read.
  * A page whose id is not in the batch's page table is never read or written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

KEY_BLOCK = 256
"""Positions per attention key block; a multiple of every page size."""

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


class ContractError(ValueError):
    """An argument outside the contract; the message names the argument."""


class BackendUnavailable(RuntimeError):
    """The backend cannot run on this machine; the message says why and what to do."""


class WeightType(StrEnum):
    """How the elements of a weight are stored; block formats are GGUF's, 32 elements a block, and
    256 in the K formats."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"

    @property
    def block_size(self) -> int:
        """Elements per block."""
        if self in (WeightType.F32, WeightType.F16, WeightType.BF16):
            return 1
        return 256 if self.value.endswith("k") else 32

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return {
            **{"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34, "q4_0": 18, "q4_1": 20},
            **{"q5_0": 22, "q5_1": 24, "q4_k": 144, "q5_k": 176, "q6_k": 210},
        }[self.value]


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix [rows, cols] or vector [cols] as stored in the checkpoint, not dequantised.

    `data` is uint8 [rows, row_bytes] (a vector has one row): each row is a whole number of blocks
    along the input dimension. It may be a read-only view into a memory-mapped file.
    """

    name: str
    type: WeightType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        rows, cols = (1, *self.shape)[-2:]
        if cols % self.type.block_size:
            raise ContractError(
                f"{self.name}: {cols} columns are not a multiple of "
                f"{self.type.value}'s block of {self.type.block_size}"
            )
        want = (rows, cols // self.type.block_size * self.type.block_bytes)
        if self.data.dtype != np.uint8 or self.data.shape != want:
            raise ContractError(
                f"{self.name}: data is {self.data.dtype}{self.data.shape}, not uint8{want}"
            )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are [out_features, in_features]."""

    attn_norm: Weight
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    mlp_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    q_bias: Weight | None = None
    k_bias: Weight | None = None
    v_bias: Weight | None = None
    o_bias: Weight | None = None
    q_norm: Weight | None = None
    k_norm: Weight | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder; `head` is None where the embedding is tied to it."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Weight
    head: Weight | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A Llama-like decoder as data: every backend steps any spec.

    Per layer: x += o(attention(rope(q_norm(q)), rope(k_norm(k)), v)); x += down(silu(gate)·up),
    each branch on an RMS-normalised input. RoPE rotates halves (element i with i + rotary_dim/2),
    with angle position · rope_inv_freq[i]; cos and sin are multiplied by `rope_scale`. Every rope
    scaling scheme (linear, llama3, yarn) is folded into `rope_inv_freq` and `rope_scale` by
    `engine.models`. Attention scores are scaled by head_dim ** -0.5.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    rope_scale: float = 1.0
    sliding_window: tuple[int, ...] | None = None
    """Per layer how many keys a query sees, itself included; 0 means all. None: all layers 0."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ContractError("num_heads is not a multiple of num_kv_heads")
        if 2 * len(self.rope_inv_freq) > self.head_dim:
            raise ContractError("rope_inv_freq is longer than half of head_dim")
        if self.sliding_window is not None and len(self.sliding_window) != self.num_layers:
            raise ContractError("sliding_window does not name one window per layer")


class KVDType(StrEnum):
    """Storage of keys and values in pages.

    The 8-bit types hold codes and one float32 scale per (layer, K or V, kv head, slot): an element
    is code · scale, with scale = largest magnitude of the head's vector / `largest`, 1 for zeros.
    """

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def itemsize(self) -> int:
        """Bytes of one element, its scale not counted."""
        return {"f32": 4, "f16": 2, "bf16": 2}.get(self.value, 1)

    @property
    def scaled(self) -> bool:
        """Whether slots have scales."""
        return self.itemsize == 1

    @property
    def largest(self) -> float:
        """The largest finite code of a scaled type."""
        return {"i8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[self.value]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a page; the physical order inside a page is the backend's own."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: KVDType = KVDType.F16

    def __post_init__(self) -> None:
        if self.page_size < 1 or KEY_BLOCK % self.page_size:
            raise ContractError(f"page_size {self.page_size} does not divide {KEY_BLOCK}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of all layers, and their scales."""
        slots = 2 * self.num_layers * self.num_kv_heads * self.page_size
        return slots * (self.head_dim * self.dtype.itemsize + 4 * self.dtype.scaled)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences of a batch whose page tables begin with the same `num_pages` pages."""

    sequences: tuple[int, ...]
    num_pages: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step over S sequences and T new tokens, prefill chunks and decodes mixed, flat.

    token_ids:    int32 [T], new tokens grouped by sequence.
    positions:    int32 [T], absolute positions; consecutive inside a sequence.
    cu_seqlens_q: int32 [S+1], prefix sums of new tokens per sequence, each at least 1.
    seq_lens:     int32 [S], keys visible to the last new token (its own included).
    page_table:   int32 [S, max_pages], page ids; entries beyond a sequence's pages are -1.
    slot_mapping: int32 [T], page · page_size + slot where the token's K and V are written, or -1:
                  the slot already holds them, and is only read (the recomputed last token of a
                  full cache hit).
    logit_rows:   int32 [R], indices into the T tokens whose logits are wanted.
    num_top:      0 for full rows, else how many of the largest logits to return per row.
    groups:       disjoint prefix groups, a hint: results never depend on it.

    No two tokens of a batch write the same slot, and no sequence reads a slot that another one
    writes in the same step.
    """

    token_ids: Int32Array
    positions: Int32Array
    cu_seqlens_q: Int32Array
    seq_lens: Int32Array
    page_table: Int32Array
    slot_mapping: Int32Array
    logit_rows: Int32Array
    num_top: int = 0
    groups: tuple[PrefixGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of the wanted rows: full rows, or the largest ones with log-sum-exp of the row.

    full:       float32 [R, vocab] when num_top is 0, else None.
    top_ids:    int32 [R, num_top], by falling logit, ties by rising id; None for full rows.
    top_logits: float32 [R, num_top]; None for full rows.
    logsumexp:  float32 [R], over the whole row; None for full rows.
    """

    full: Float32Array | None
    top_ids: Int32Array | None = None
    top_logits: Float32Array | None = None
    logsumexp: Float32Array | None = None


class Model(Protocol):
    """Loaded weights, repacked for one backend."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes the repacked weights occupy."""


class KVPool(Protocol):
    """Memory of `num_pages` pages."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_pages(self) -> int: ...


M = TypeVar("M", bound=Model)
K = TypeVar("K", bound=KVPool)


def do_nothing() -> None:
    """While a step computes."""


class Backend(Protocol[M, K]):
    """A way to step a decoder. Calls come from one thread at a time.

    `name` and `numeric_mode` go into the cache namespace: KV computed under one numeric mode is
    never read under another.
    """

    @property
    def name(self) -> str: ...

    @property
    def numeric_mode(self) -> str:
        """For example "cpu-avx2-w4a8": what decides the bits of a result."""

    @property
    def kv_dtype(self) -> KVDType:
        """What pages hold where nothing else is asked for."""

    def free_device_bytes(self) -> int | None:
        """Memory of the device that is left now; None where pages lie in the machine's own."""

    def load(self, spec: DecoderSpec, weights: DecoderWeights) -> M:
        """Repack the weights. The arguments' buffers are not needed afterwards.

        Raises ContractError naming the weight that does not fit the spec.
        """

    def alloc_kv(self, layout: KVLayout, num_pages: int) -> K:
        """Memory for the pages, its contents undefined. Raises MemoryError."""

    def copy_pages(self, kv: K, src: Int32Array, dst: Int32Array) -> None:
        """Copy page src[i] to dst[i], all layers; no page is in both src and dst."""

    def export_page(self, kv: K, page: int) -> bytes:
        """The page in logical order [layer, K|V, kv_head, slot, head_dim], in the pool's dtype,
        then its scales [layer, K|V, kv_head, slot], float32, where the dtype has them."""

    def import_page(self, kv: K, page: int, data: bytes) -> None:
        """The inverse of `export_page`."""

    def prepare(self, model: M, kv: K, batch: ForwardBatch) -> None:
        """Do what can be done for a step of this batch before it begins, perhaps while another one
        runs. Only `token_ids` may change, in place, until `step` gets this object with the same
        model and pages; and it need not get it. Raises what `step` raises."""

    def step(
        self, model: M, kv: K, batch: ForwardBatch, meanwhile: Callable[[], None] = do_nothing
    ) -> StepLogits:
        """Write K and V of the new tokens to their slots and return the logits asked for.

        `meanwhile` is called once on the way, after the step has begun where it can go on by
        itself. It calls no backend, but for `prepare` and `export_page` of a page that is not
        written; if it raises, so does `step`, and nothing goes on.
        Raises ContractError, before anything is written, for shapes, dtypes, token or page ids
        outside the contract.
        """

    def close(self) -> None:
        """Release threads and device memory; the backend is not used afterwards."""


def check_batch(batch: ForwardBatch, spec: DecoderSpec, layout: KVLayout, num_pages: int) -> None:
    """Raise ContractError for the first argument of `batch` that is outside the contract."""
    arrays: Sequence[tuple[str, Int32Array, int]] = (
        ("token_ids", batch.token_ids, 1),
        ("positions", batch.positions, 1),
        ("cu_seqlens_q", batch.cu_seqlens_q, 1),
        ("seq_lens", batch.seq_lens, 1),
        ("page_table", batch.page_table, 2),
        ("slot_mapping", batch.slot_mapping, 1),
        ("logit_rows", batch.logit_rows, 1),
    )
    for name, array, ndim in arrays:
        if array.dtype != np.int32 or array.ndim != ndim or not array.flags.c_contiguous:
            raise ContractError(f"{name} is not a contiguous int32 array of {ndim} dimensions")
    num_tokens, num_seqs = batch.token_ids.size, batch.seq_lens.size
    if batch.positions.size != num_tokens or batch.slot_mapping.size != num_tokens:
        raise ContractError("positions and slot_mapping need one entry per token")
    cu = batch.cu_seqlens_q
    if cu.size != num_seqs + 1 or cu[0] != 0 or cu[-1] != num_tokens or np.any(np.diff(cu) < 1):
        raise ContractError("cu_seqlens_q is not a rising prefix sum over all tokens")
    if batch.page_table.shape[0] != num_seqs:
        raise ContractError("page_table needs one row per sequence")
    rows = batch.logit_rows
    if rows.size and (rows.min() < 0 or rows.max() >= num_tokens):
        raise ContractError("logit_rows has a row outside the tokens")
    if not 0 <= batch.num_top <= spec.vocab_size:
        raise ContractError("num_top is outside 0..vocab_size")
    for group in batch.groups:
        if any(not 0 <= s < num_seqs for s in group.sequences):
            raise ContractError("groups names a sequence outside the batch")
    if num_tokens == 0:
        return
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= spec.vocab_size:
        raise ContractError(f"token_ids has an id outside the vocabulary of {spec.vocab_size}")
    last = cu[1:] - 1
    if np.any(batch.positions[last] != batch.seq_lens - 1):
        raise ContractError("positions: a sequence's last new token is not at seq_lens - 1")
    steps = np.diff(batch.positions)
    inside = np.ones(num_tokens - 1, dtype=bool)
    inside[last[:-1]] = False
    if np.any(steps[inside] != 1) or batch.positions.min() < 0:
        raise ContractError("positions are not consecutive inside a sequence")
    pages_needed = -(-batch.seq_lens // layout.page_size)
    if pages_needed.max() > batch.page_table.shape[1]:
        raise ContractError("page_table is too narrow for seq_lens")
    used = np.arange(batch.page_table.shape[1])[None, :] < pages_needed[:, None]
    ids = batch.page_table[used]
    if ids.min() < 0 or ids.max() >= num_pages:
        raise ContractError(f"page_table has a page outside the pool of {num_pages}")
    sequence = np.repeat(np.arange(num_seqs), np.diff(cu))
    page = batch.page_table[sequence, batch.positions // layout.page_size]
    slot = page * layout.page_size + batch.positions % layout.page_size
    if np.any((batch.slot_mapping != -1) & (batch.slot_mapping != slot)):
        raise ContractError("slot_mapping is not the token's own slot, nor -1")

"""The CPU backend: contract.Backend over the native library, a whole step in one call.

Numeric modes, with the instruction set that runs in the name: "cpu-avx2-w4a8": 4-bit weights meet
activations quantised to 8 bits per row and 32 columns, Q8_0 weights meet 16-bit ones, float weights
meet float32; everything else is float32. "cpu-avx2-exact": float32 activations throughout. Every
instruction set gives the bits of AVX2.

How attention computes follows from what the pages hold. Over float16 and 8-bit codes queries and
weights are float32. Over bfloat16 they are rounded to bfloat16 as well, and sums are float32: two
products an instruction where the processor has AVX512_BF16, which is why pages are bfloat16 there
unless something else is asked for.
"""

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from kernels.contract import (
    BackendUnavailable,
    ContractError,
    DecoderSpec,
    DecoderWeights,
    ForwardBatch,
    Int32Array,
    KVDType,
    KVLayout,
    LayerWeights,
    PrefixGroup,
    StepLogits,
    Weight,
    WeightType,
    check_batch,
    do_nothing,
)
from kernels.cpu import build, library
from kernels.weight_shapes import check_weights

MAX_HEAD_DIM = 1024
_TYPE_CODES = {type_: code for code, type_ in enumerate(WeightType)}
_PAGE_CODES = {KVDType.F16: 0, KVDType.I8: 1, KVDType.BF16: 2}


class _Handle:
    """A native object, freed when nothing refers to this any more, or by `free`."""

    def __init__(self, library_: ctypes.CDLL, free: str, address: int) -> None:
        self.address = address
        self.free = weakref.finalize(self, getattr(library_, free), address)


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Weights packed in tiles of 16 output rows."""

    spec: DecoderSpec
    weight_bytes: int
    handle: _Handle


@dataclass(frozen=True, slots=True)
class CpuKVPool:
    """Pages in memory that the system provides a little before they are first written."""

    layout: KVLayout
    num_pages: int
    handle: _Handle


class CpuBackend:
    """contract.Backend on x86-64 with AVX2, FMA and F16C; AVX-512 with VNNI and BF16 where there.

    Raises BackendUnavailable, saying what to do, where the processor cannot run it or it cannot
    be compiled.

    threads: how many compute, the caller of `step` included; 0 means as many as this process may
        use cores.
    exact: float32 activations instead of 8-bit ones; slower, for tests and comparisons.
    isa: one of build.INSTRUCTION_SETS, for tests and comparisons; None takes the best there is.
    """

    name = "cpu"

    def __init__(self, threads: int = 0, exact: bool = False, *, isa: str | None = None) -> None:
        if threads < 0:
            raise ContractError(f"threads is {threads}, not 0 or a count")
        flags = build.read_cpu_flags()
        build.check_cpu(flags)
        sets = build.instruction_sets(flags)
        if isa is not None and isa not in sets:
            raise BackendUnavailable(f"This processor runs {', '.join(sets)}, not {isa}.")
        number = sets.index(isa) if isa else len(sets) - 1
        self._library = library.open_library(build.library_path())
        self.threads = threads or len(os.sched_getaffinity(0))
        self._exact = exact
        address = self._library.hw_open(self.threads, int(exact), number)
        if not address:
            raise MemoryError("no memory for the cpu backend's threads")
        self._handle = _Handle(self._library, "hw_close", address)
        self._isa = self._library.hw_isa(address).decode()
        self._read = _Memory()
        self._tokens = _Memory()
        self._next: tuple[ForwardBatch, CpuModel, CpuKVPool, StepLogits, Int32Array] | None = None

    @property
    def numeric_mode(self) -> str:
        return f"cpu-{self._isa}-{'exact' if self._exact else 'w4a8'}"

    @property
    def kv_dtype(self) -> KVDType:
        """bfloat16 where its products are fast, and float16, which is finer, elsewhere."""
        return KVDType.BF16 if self._isa == "avx512bf16" and not self._exact else KVDType.F16

    def free_device_bytes(self) -> int | None:
        """Pages lie in the machine's memory."""
        return None

    def load(self, spec: DecoderSpec, weights: DecoderWeights) -> CpuModel:
        """Repack the weights. See contract.Backend.load."""
        _check_head_dim(spec.head_dim)
        sources = _source_weights(spec, weights)
        native = _native_spec(spec)
        address = self._library.hw_load(self._handle.address, native, sources)
        if not address:
            raise MemoryError("no memory for the model's weights")
        handle = _Handle(self._library, "hw_free_model", address)
        return CpuModel(spec, self._library.hw_model_bytes(address), handle)

    def alloc_kv(self, layout: KVLayout, num_pages: int) -> CpuKVPool:
        """Memory for the pages, f16, bf16 or i8. Raises MemoryError; ContractError for another
        dtype, and for bf16 pages of an odd size: their slots lie in pairs."""
        if layout.dtype not in _PAGE_CODES:
            names = ", ".join(dtype.value for dtype in _PAGE_CODES)
            raise ContractError(f"the cpu backend keeps KV in {names}, not {layout.dtype.value}")
        if layout.dtype is KVDType.BF16 and layout.page_size % 2:
            raise ContractError(
                f"page_size {layout.page_size} is odd, which bf16 cannot be kept in"
            )
        _check_head_dim(layout.head_dim)
        if num_pages < 1:
            raise ContractError(f"num_pages is {num_pages}, not at least 1")
        address = self._library.hw_alloc_kv(
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            layout.page_size,
            _PAGE_CODES[layout.dtype],
            num_pages,
        )
        if not address:
            raise MemoryError(f"no memory for {num_pages} pages of {layout.page_bytes} bytes")
        return CpuKVPool(layout, num_pages, _Handle(self._library, "hw_free_kv", address))

    def copy_pages(self, kv: CpuKVPool, src: Int32Array, dst: Int32Array) -> None:
        """Copy page src[i] to dst[i], all layers; no page is in both."""
        for name, pages in (("src", src), ("dst", dst)):
            if pages.dtype != np.int32 or pages.ndim != 1 or not pages.flags.c_contiguous:
                raise ContractError(f"{name} is not a contiguous int32 array of 1 dimension")
            if pages.size and not 0 <= pages.min() <= pages.max() < kv.num_pages:
                raise ContractError(f"{name} has a page outside the pool of {kv.num_pages}")
        if src.size != dst.size:
            raise ContractError("src and dst differ in length")
        if np.intersect1d(src, dst).size:
            raise ContractError("a page is in both src and dst")
        self._library.hw_copy_pages(kv.handle.address, src.ctypes.data, dst.ctypes.data, src.size)

    def export_page(self, kv: CpuKVPool, page: int) -> bytes:
        """The page in logical order. See contract.Backend.export_page."""
        _check_page(kv, page)
        data = np.empty(kv.layout.page_bytes, dtype=np.uint8)
        self._library.hw_export_page(kv.handle.address, page, data.ctypes.data)
        return data.tobytes()

    def import_page(self, kv: CpuKVPool, page: int, data: bytes) -> None:
        """The inverse of `export_page`."""
        _check_page(kv, page)
        if len(data) != kv.layout.page_bytes:
            raise ContractError(f"data has {len(data)} bytes, not {kv.layout.page_bytes}")
        source = np.frombuffer(data, dtype=np.uint8)
        self._library.hw_import_page(kv.handle.address, page, source.ctypes.data)

    def prepare(self, model: CpuModel, kv: CpuKVPool, batch: ForwardBatch) -> None:
        """Check and pack a batch, and plan its step. See contract.Backend.prepare."""
        spec, layout = model.spec, kv.layout
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != (
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
        ):
            raise ContractError("kv has pages of another model's shape")
        self._next = None
        if not batch.token_ids.size:
            check_batch(batch, spec, layout, kv.num_pages)
            return
        rows = batch.logit_rows.size
        logits, result = _logits(rows, batch.num_top, spec.vocab_size)
        packed = _pack(batch, self._read)
        status = library.INVALID
        if packed is not None:
            status = self._library.hw_prepare(
                self._handle.address, model.handle.address, kv.handle.address, packed, result
            )
        if status == library.INVALID:
            check_batch(batch, spec, layout, kv.num_pages)
            raise ContractError("the batch is outside the contract")
        if status:
            raise MemoryError(f"no memory for a step of {batch.token_ids.size} tokens")
        self._next = batch, model, kv, logits, self._tokens.take(batch.token_ids.size)

    def step(
        self,
        model: CpuModel,
        kv: CpuKVPool,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        """One step; the GIL is free while it runs. See contract.Backend.step."""
        prepared = self._next
        if prepared is None or prepared[0] is not batch:
            self.prepare(model, kv, batch)
            prepared = self._next
        if prepared is None:
            meanwhile()
            return _logits(batch.logit_rows.size, batch.num_top, model.spec.vocab_size)[0]
        self._next = None
        _, _, _, logits, tokens = prepared
        tokens[:] = batch.token_ids
        status = self._library.hw_start(self._handle.address, self._tokens.address)
        if status == library.INVALID:
            size = model.spec.vocab_size
            raise ContractError(f"token_ids has an id outside the vocabulary of {size}")
        if status:
            raise MemoryError(f"no memory for a step of {batch.token_ids.size} tokens")
        try:
            meanwhile()
        finally:
            self._library.hw_finish(self._handle.address)
        return logits

    def read_memory(self, data: NDArray[np.uint8]) -> int:
        """Read a contiguous array once with all threads, for measurements; returns a sum."""
        total: int = self._library.hw_read(self._handle.address, data.ctypes.data, data.nbytes)
        return total

    def multiply(self, integer: bool, rounds: int) -> int:
        """Multiply-adds on registers with all threads, of floats or of 8-bit integers, for
        measurements; returns how many products were computed."""
        total: int = self._library.hw_multiply(self._handle.address, int(integer), rounds)
        return total

    def close(self) -> None:
        """End the threads. Models and pools may outlive it, and are freed with their last user."""
        self._handle.free()


def _check_head_dim(head_dim: int) -> None:
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ContractError(f"head_dim {head_dim} is not a multiple of 8, at most {MAX_HEAD_DIM}")


def _check_page(kv: CpuKVPool, page: int) -> None:
    if not 0 <= page < kv.num_pages:
        raise ContractError(f"page {page} is outside the pool of {kv.num_pages}")


class _Memory:
    """Numbers that steps read: kept, as asking numpy for an address costs more than filling it."""

    def __init__(self) -> None:
        self._numbers = np.empty(0, dtype=np.int32)
        self.address = 0

    def take(self, count: int) -> Int32Array:
        """int32 [count] at `address`, contents undefined; the one of before is not used again."""
        if count > self._numbers.size:
            self._numbers = np.empty(2 * count, dtype=np.int32)
            self.address = self._numbers.ctypes.data
        return self._numbers[:count]


def _logits(rows: int, top: int, vocab_size: int) -> tuple[StepLogits, library.Result]:
    """Where a step writes what is wanted of so many rows."""
    if not top:
        full = np.empty((rows, vocab_size), dtype=np.float32)
        return StepLogits(full), library.Result(full.ctypes.data, None, None, None)
    ids = np.empty((rows, top), dtype=np.int32)
    logits = np.empty((rows, top), dtype=np.float32)
    sums = np.empty(rows, dtype=np.float32)
    result = library.Result(None, ids.ctypes.data, logits.ctypes.data, sums.ctypes.data)
    return StepLogits(None, ids, logits, sums), result


def _pack(batch: ForwardBatch, memory: _Memory) -> library.Batch | None:
    """The batch with its arrays one after another in `memory`; None where their shapes or dtypes
    are outside the contract."""
    arrays = [
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.logit_rows,
        batch.page_table,
    ]
    num_tokens, num_rows = batch.token_ids.size, batch.logit_rows.size
    num_seqs, width = batch.page_table.shape if batch.page_table.ndim == 2 else (0, 0)
    tokens = (num_tokens,)
    ends, rows = (num_seqs + 1,), (num_rows,)
    wanted = [tokens, tokens, tokens, ends, (num_seqs,), rows, (num_seqs, width)]
    if [array.shape for array in arrays] != wanted:
        return None
    count = 3 * num_tokens + 2 * num_seqs + 1 + num_rows + num_seqs * width
    if batch.groups:
        groups = _flat_groups(batch.groups)
        arrays.append(groups)
        count += groups.size
    try:
        np.concatenate(arrays, axis=None, out=memory.take(count), casting="no")
    except TypeError:
        return None
    return library.Batch(
        num_tokens,
        num_seqs,
        width,
        num_rows,
        batch.num_top,
        len(batch.groups),
        count,
        memory.address,
    )


def _flat_groups(groups: Sequence[PrefixGroup]) -> Int32Array:
    """Pages of each group, where its sequences begin and where the last ones end, and these."""
    pages = [group.num_pages for group in groups]
    starts = accumulate((len(group.sequences) for group in groups), initial=0)
    sequences = chain.from_iterable(group.sequences for group in groups)
    return np.array([*pages, *starts, *sequences], dtype=np.int32)


def _native_spec(spec: DecoderSpec) -> library.Spec:
    windows = spec.sliding_window or (0,) * spec.num_layers
    return library.Spec(
        spec.num_layers,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
        len(spec.rope_inv_freq),
        spec.norm_eps,
        spec.rope_scale,
        (ctypes.c_double * len(spec.rope_inv_freq))(*spec.rope_inv_freq),
        (ctypes.c_int32 * spec.num_layers)(*windows),
    )


def _source_weights(
    spec: DecoderSpec, weights: DecoderWeights
) -> "ctypes.Array[library.SourceWeight]":
    """All weights in the native order. Raises ContractError for the first that does not fit."""
    check_weights(spec, weights)
    ordered = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        ordered += [getattr(layer, field.name) for field in fields(LayerWeights)]
    return (library.SourceWeight * len(ordered))(*map(_source, ordered))


def _source(weight: Weight | None) -> library.SourceWeight:
    if weight is None:
        return library.SourceWeight(0, 0, 0, 0, None)
    if len(weight.shape) == 1 and weight.type.block_size > 1:
        raise ContractError(f"{weight.name}: a vector in {weight.type.value}, not in floats")
    if not weight.data.flags.c_contiguous:
        raise ContractError(f"{weight.name}: data is not contiguous")
    rows, cols = (1, *weight.shape)[-2:]
    return library.SourceWeight(_TYPE_CODES[weight.type], rows, cols, 0, weight.data.ctypes.data)

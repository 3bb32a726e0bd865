"""Pages of the CPU backend: logical order, copies, ties, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.contract import ContractError, Float32Array, KVDType, KVLayout, Weight, WeightType
from kernels.cpu.backend import CpuBackend, CpuKVPool, CpuModel
from kernels.random_weights import random_weights
from kernels.reference import ReferenceBackend
from tests.kernels.small_decoder import SPEC, all_of
from tests.kernels.stepping import kv_layout, make_batch

LAYOUT = kv_layout(SPEC, 16, KVDType.F16)


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1, exact=True)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def model(backend: CpuBackend) -> CpuModel:
    return backend.load(
        SPEC, random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.F32))
    )


def filled(backend: CpuBackend, layout: KVLayout, num_pages: int) -> tuple[CpuKVPool, list[bytes]]:
    rng = np.random.default_rng(num_pages)
    pages = [rng.bytes(layout.page_bytes) for _ in range(num_pages)]
    kv = backend.alloc_kv(layout, num_pages)
    for page, data in enumerate(pages):
        backend.import_page(kv, page, data)
    return kv, pages


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    [
        *((dtype, size) for dtype in (KVDType.F16, KVDType.I8) for size in (1, 4, 8, 16, 32)),
        *((KVDType.BF16, size) for size in (2, 8, 16, 32)),
    ],
)
def test_export_returns_what_was_imported(
    backend: CpuBackend, page_size: int, dtype: KVDType
) -> None:
    kv, pages = filled(backend, replace(LAYOUT, page_size=page_size, dtype=dtype), 3)
    assert [backend.export_page(kv, page) for page in range(3)] == pages


@pytest.mark.parametrize("dtype", [KVDType.F16, KVDType.I8, KVDType.BF16])
def test_copy_pages(backend: CpuBackend, dtype: KVDType) -> None:
    kv, pages = filled(backend, replace(LAYOUT, dtype=dtype), 5)
    backend.copy_pages(kv, np.array([0, 3], dtype=np.int32), np.array([4, 1], dtype=np.int32))
    got = [backend.export_page(kv, page) for page in range(5)]
    assert got == [pages[0], pages[3], pages[2], pages[3], pages[0]]


def floats(data: bytes, dtype: KVDType) -> Float32Array:
    """Elements of float16 or bfloat16."""
    if dtype is KVDType.F16:
        return np.frombuffer(data, dtype=np.float16).astype(np.float32)
    return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(KVDType.F16, 2e-3, 1e-4), (KVDType.BF16, 1e-2, 1e-2)]
)
def test_logical_order_is_the_reference_backends(
    backend: CpuBackend, model: CpuModel, dtype: KVDType, rtol: float, atol: float
) -> None:
    """What a step wrote is exported as the reference exports it, within the rounding of its
    elements; slots without a token stay as they were."""
    layout = replace(LAYOUT, dtype=dtype)
    batch = make_batch([(list(range(21)), 0, [2, 0])], 16)

    def written(one: Any, loaded: Any) -> Float32Array:
        kv = one.alloc_kv(layout, 3)
        for page in range(3):
            one.import_page(kv, page, b"\x01" * layout.page_bytes)
        one.step(loaded, kv, batch)
        pages = b"".join(one.export_page(kv, page) for page in range(3))
        return floats(pages, dtype)

    reference = ReferenceBackend(threads=1)
    weights = random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.F32))
    expected = written(reference, reference.load(SPEC, weights))
    np.testing.assert_allclose(written(backend, model), expected, rtol=rtol, atol=atol)


def test_codes_are_the_reference_backends(backend: CpuBackend, model: CpuModel) -> None:
    """The keys and values of a step, exported as codes and scales, are the reference's to a
    code."""
    layout = replace(LAYOUT, dtype=KVDType.I8)
    batch = make_batch([(list(range(16)), 0, [1])], 16)

    def written(one: Any, loaded: Any) -> tuple[Float32Array, Float32Array]:
        kv = one.alloc_kv(layout, 2)
        one.step(loaded, kv, batch)
        page = one.export_page(kv, 1)
        codes = layout.page_bytes * SPEC.head_dim // (SPEC.head_dim + 4)
        return np.frombuffer(page[:codes], np.int8), np.frombuffer(page[codes:], np.float32)

    reference = ReferenceBackend(threads=1)
    weights = random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.F32))
    expected, expected_scales = written(reference, reference.load(SPEC, weights))
    codes, scales = written(backend, model)
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-2)
    assert np.abs(codes.astype(int) - expected).max() <= 2
    assert np.mean(codes == expected) > 0.97


def test_pages_outside_the_table_are_untouched(backend: CpuBackend, model: CpuModel) -> None:
    kv, pages = filled(backend, LAYOUT, 6)
    backend.step(model, kv, make_batch([(list(range(40)), 0, [4, 1, 3])], 16))
    assert [backend.export_page(kv, page) for page in (0, 2, 5)] == [pages[0], pages[2], pages[5]]


def test_ties_go_to_the_lower_id(backend: CpuBackend) -> None:
    weights = random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.F32))
    rows = weights.embedding.data.copy()
    rows[:] = rows[7]
    embedding = Weight("embedding", WeightType.F32, weights.embedding.shape, rows)
    model = backend.load(SPEC, replace(weights, embedding=embedding))
    kv = backend.alloc_kv(LAYOUT, 1)
    result = backend.step(model, kv, make_batch([([5], 0, [0])], 16, num_top=20))
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [list(range(20))]


def test_no_tokens(backend: CpuBackend, model: CpuModel) -> None:
    kv = backend.alloc_kv(LAYOUT, 1)
    batch = replace(
        make_batch([([5], 0, [0])], 16, logit_rows=()),
        token_ids=np.empty(0, dtype=np.int32),
        positions=np.empty(0, dtype=np.int32),
        slot_mapping=np.empty(0, dtype=np.int32),
        cu_seqlens_q=np.zeros(1, dtype=np.int32),
        seq_lens=np.empty(0, dtype=np.int32),
        page_table=np.empty((0, 1), dtype=np.int32),
    )
    logits = backend.step(model, kv, batch).full
    assert logits is not None
    assert logits.shape == (0, SPEC.vocab_size)


def test_a_refused_batch_writes_nothing(backend: CpuBackend, model: CpuModel) -> None:
    kv, pages = filled(backend, LAYOUT, 2)
    batch = make_batch([([5, SPEC.vocab_size], 0, [0])], 16)
    with pytest.raises(ContractError, match="token_ids"):
        backend.step(model, kv, batch)
    assert [backend.export_page(kv, page) for page in range(2)] == pages


def test_refusals_name_the_argument(backend: CpuBackend, model: CpuModel) -> None:
    kv = backend.alloc_kv(LAYOUT, 2)
    other = backend.alloc_kv(replace(LAYOUT, num_layers=1), 2)
    one, two = np.array([1], dtype=np.int32), np.array([2], dtype=np.int32)
    weights = random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.Q4_1))
    block_vector = Weight("final_norm", WeightType.Q8_0, (96,), np.zeros((1, 102), np.uint8))
    with pytest.raises(ContractError, match="kv has pages"):
        backend.step(model, other, make_batch([([5], 0, [0])], 16))
    with pytest.raises(ContractError, match="dst has a page outside"):
        backend.copy_pages(kv, one, two)
    with pytest.raises(ContractError, match="src and dst"):
        backend.copy_pages(kv, one, one)
    with pytest.raises(ContractError, match="page 2 is outside"):
        backend.export_page(kv, 2)
    with pytest.raises(ContractError, match="data has 3 bytes"):
        backend.import_page(kv, 1, b"abc")
    with pytest.raises(ContractError, match="f16, i8, bf16, not f32"):
        backend.alloc_kv(replace(LAYOUT, dtype=KVDType.F32), 2)
    with pytest.raises(ContractError, match="page_size 1 is odd"):
        backend.alloc_kv(replace(LAYOUT, dtype=KVDType.BF16, page_size=1), 2)
    with pytest.raises(ContractError, match="head_dim 12"):
        backend.alloc_kv(replace(LAYOUT, head_dim=12), 2)
    with pytest.raises(ContractError, match="final_norm: a vector in q8_0"):
        backend.load(SPEC, replace(weights, final_norm=block_vector))
    with pytest.raises(ContractError, match="head_dim 12"):
        backend.load(replace(SPEC, head_dim=12, rope_inv_freq=()), weights)
    with pytest.raises(ContractError, match="threads is -1"):
        CpuBackend(threads=-1)


def test_no_memory(backend: CpuBackend) -> None:
    with pytest.raises(MemoryError, match="pages of"):
        backend.alloc_kv(replace(LAYOUT, num_layers=2**20), 2**30)

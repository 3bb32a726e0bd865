"""A row's logits never depend on chunking, batch, pages, threads or instruction set: equality, bit
for bit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kernels.contract import Float32Array, ForwardBatch, KVDType, PrefixGroup, WeightType
from kernels.cpu.backend import CpuBackend, CpuKVPool, CpuModel
from kernels.cpu.build import instruction_sets, read_cpu_flags
from kernels.random_weights import random_weights
from tests.kernels.small_decoder import SPEC as SMALL
from tests.kernels.stepping import kv_layout, make_batch

# Several key blocks of 256, a window that begins inside a block, and all kinds of products.
SPEC = replace(SMALL, num_layers=3, sliding_window=(0, 100, 300))
TOKENS = np.random.default_rng(8).integers(0, SPEC.vocab_size, 560).tolist()
PAGE_SIZE = 16
NUM_PAGES = 40
TYPES = {
    "k": WeightType.Q8_0,
    "v": WeightType.Q4_0,
    "o": WeightType.BF16,
    "up": WeightType.F16,
    "embedding": WeightType.Q8_0,
}


# What runs and what pages hold; all must equal one AVX2 thread.
KINDS = (
    ("avx2", KVDType.F16),
    ("avx512", KVDType.F16),
    ("avx2", KVDType.BF16),
    ("avx512bf16", KVDType.BF16),
)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, KVDType]:
    isa, dtype = request.param
    if isa not in instruction_sets(read_cpu_flags()):
        pytest.skip(f"this processor does not run {isa}")
    return isa, dtype


@pytest.fixture(scope="module")
def dtype(kind: tuple[str, KVDType]) -> KVDType:
    return kind[1]


@pytest.fixture(scope="module")
def backend(kind: tuple[str, KVDType]) -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2, isa=kind[0])
    yield backend
    backend.close()


def load(backend: CpuBackend) -> CpuModel:
    rng = np.random.default_rng(4)
    return backend.load(
        SPEC, random_weights(SPEC, rng, lambda name: TYPES.get(name, WeightType.Q4_1))
    )


@pytest.fixture(scope="module")
def model(backend: CpuBackend) -> CpuModel:
    return load(backend)


def full(backend: CpuBackend, model: CpuModel, kv: CpuKVPool, batch: ForwardBatch) -> Float32Array:
    logits = backend.step(model, kv, batch).full
    assert logits is not None
    return logits


def in_chunks(
    backend: CpuBackend,
    model: CpuModel,
    chunk: int,
    dtype: KVDType,
    pages: Sequence[int] = range(NUM_PAGES),
) -> Float32Array:
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), NUM_PAGES)
    rows = [
        full(backend, model, kv, make_batch([(TOKENS[at : at + chunk], at, pages)], PAGE_SIZE))
        for at in range(0, len(TOKENS), chunk)
    ]
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def whole(dtype: KVDType) -> Float32Array:
    """All in one chunk, by one AVX2 thread: what every other way must equal."""
    backend = CpuBackend(threads=1, isa="avx2")
    logits = in_chunks(backend, load(backend), len(TOKENS), dtype)
    backend.close()
    assert np.isfinite(logits).all()
    return logits


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 129, 512, 560])
def test_chunking(
    chunk: int, backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    """Chunks of 1 are decode: it equals prefill."""
    np.testing.assert_array_equal(in_chunks(backend, model, chunk, dtype), whole)


@pytest.mark.parametrize(
    "rows",
    [(559,), (0, 1, 255, 256, 300, 559), (300, 559, 300, 1), (), tuple(range(559))],
    ids=["last", "some", "in any order", "none", "all but one"],
)
def test_wanted_rows(
    rows: tuple[int, ...],
    backend: CpuBackend,
    model: CpuModel,
    dtype: KVDType,
    whole: Float32Array,
) -> None:
    """Rows whose logits are not wanted are left out of the last layer, but for keys and values:
    those of a chunk are there for the next one."""
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), NUM_PAGES)
    pages = range(NUM_PAGES)
    batch = make_batch([(TOKENS, 0, pages)], PAGE_SIZE, logit_rows=rows)
    np.testing.assert_array_equal(full(backend, model, kv, batch), whole[list(rows)])
    after = make_batch([(TOKENS[559:], 559, pages)], PAGE_SIZE)
    np.testing.assert_array_equal(full(backend, model, kv, after), whole[559:])


def test_wanted_rows_of_some_sequences(
    backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    """Decodes behind one prefix, in a group, beside chunks with and without wanted rows."""
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), 4 * NUM_PAGES)
    shared, ends = range(32), (range(32, 40), range(40, 48), range(48, 56))
    tables = [[*shared, *end] for end in ends]
    for table in tables:
        full(backend, model, kv, make_batch([(TOKENS[:530], 0, table)], PAGE_SIZE))
    other = list(range(60, 100))
    third = list(range(100, 140))
    batch = make_batch(
        [
            (TOKENS[:70], 0, other),
            *((TOKENS[530:531], 530, table) for table in tables),
            (TOKENS[:40], 0, third),
        ],
        PAGE_SIZE,
        logit_rows=[70, 71, 72, 90, 112],
    )
    group = replace(batch, groups=(PrefixGroup((1, 2, 3), len(shared)),))
    expected = whole[[530, 530, 530, 17, 39]]
    np.testing.assert_array_equal(full(backend, model, kv, batch), expected)
    np.testing.assert_array_equal(full(backend, model, kv, group), expected)
    mixed = replace(group, groups=(PrefixGroup((0, 1, 2, 3), len(shared)),))
    np.testing.assert_array_equal(full(backend, model, kv, mixed), expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunking_over_codes(
    chunk: int, backend: CpuBackend, model: CpuModel, whole: Float32Array
) -> None:
    one = CpuBackend(threads=1, isa="avx2")
    expected = in_chunks(one, load(one), len(TOKENS), KVDType.I8)
    one.close()
    assert np.isfinite(expected).all() and not np.array_equal(expected, whole)
    np.testing.assert_array_equal(in_chunks(backend, model, chunk, KVDType.I8), expected)


@pytest.mark.parametrize("exact", [False, True])
def test_threads(
    exact: bool, kind: tuple[str, KVDType], model: CpuModel, whole: Float32Array
) -> None:
    isa, dtype = kind
    results = []
    for threads in (1, 2, 3):
        backend = CpuBackend(threads, exact, isa=isa)
        results.append(in_chunks(backend, load(backend), 200, dtype))
        backend.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert np.array_equal(results[0], whole) is not exact


def test_more_threads_than_cores_over_many_steps(dtype: KVDType, whole: Float32Array) -> None:
    """Workers that wake late find a step done, or the next one begun."""
    backend = CpuBackend(threads=8)
    model = load(backend)
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), 1)
    batch = make_batch([(TOKENS[:9], 0, [0])], PAGE_SIZE)
    for _ in range(200):
        np.testing.assert_array_equal(full(backend, model, kv, batch), whole[:9])
    backend.close()


def test_page_ids(
    backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    pages = np.random.default_rng(1).permutation(NUM_PAGES).tolist()
    np.testing.assert_array_equal(in_chunks(backend, model, 250, dtype, pages), whole)


@pytest.mark.parametrize("place", [0, 3, 5])
def test_neighbours(
    place: int, backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    """A decode and a chunk among other sequences of all lengths are what they are alone."""
    rng = np.random.default_rng(place)
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), 5 * NUM_PAGES)
    pages = range(NUM_PAGES)
    full(backend, model, kv, make_batch([(TOKENS[:400], 0, pages)], PAGE_SIZE))
    for start, length in ((400, 1), (401, 140)):
        parts = [
            (rng.integers(0, SPEC.vocab_size, n).tolist(), 0, range(first, first + 10))
            for n, first in ((1, 50), (33, 60), (2, 70), (160, 80), (1, 90))
        ]
        parts.insert(place, (TOKENS[start : start + length], start, pages))
        before = sum(len(ids) for ids, _, _ in parts[:place])
        logits = full(backend, model, kv, make_batch(parts, PAGE_SIZE))
        np.testing.assert_array_equal(
            logits[before : before + length], whole[start : start + length]
        )


def test_shared_pages_and_groups(
    backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    """Eight decodes over the same pages, each from a copy of the last page, with and without the
    hint."""
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), NUM_PAGES + 8)
    prompt = 401
    full(backend, model, kv, make_batch([(TOKENS[:prompt], 0, range(NUM_PAGES))], PAGE_SIZE))
    shared = prompt // PAGE_SIZE
    own = np.arange(NUM_PAGES, NUM_PAGES + 8, dtype=np.int32)
    backend.copy_pages(kv, np.full(8, shared, dtype=np.int32), own)
    parts = [(TOKENS[prompt : prompt + 1], prompt, [*range(shared), int(page)]) for page in own]
    batch = make_batch(parts, PAGE_SIZE)
    hinted = replace(batch, groups=(PrefixGroup(tuple(range(8)), shared),))
    for one in (batch, hinted):
        np.testing.assert_array_equal(
            full(backend, model, kv, one), np.repeat(whole[prompt : prompt + 1], 8, axis=0)
        )


def prefix(backend: CpuBackend, model: CpuModel, dtype: KVDType, num_tails: int) -> CpuKVPool:
    """A pool whose first pages hold TOKENS, and as many times those pages again, empty."""
    pages = (1 + num_tails) * NUM_PAGES
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), pages)
    poison = b"\xff" * kv.layout.page_bytes  # NaN
    for page in range(pages):
        backend.import_page(kv, page, poison)
    full(backend, model, kv, make_batch([(TOKENS, 0, range(NUM_PAGES))], PAGE_SIZE))
    return kv


@pytest.mark.parametrize("shared", [15, 16, 17, 31, 33])
def test_groups_change_nothing(
    shared: int, backend: CpuBackend, model: CpuModel, dtype: KVDType
) -> None:
    """Tails of all lengths behind the same pages, one of them a long chunk, decodes of the whole,
    and strangers: hinted, half hinted and hinted wrongly, the rows are those of no hint."""
    lengths = (1, 1, 5, 1, 70, 2, 1, 17, 1, 1, 1, 1)
    rng = np.random.default_rng(shared)
    parts = []
    for i, length in enumerate(lengths):
        own = range((1 + i) * NUM_PAGES, (2 + i) * NUM_PAGES)
        tail = rng.integers(0, SPEC.vocab_size, length).tolist()
        parts.append((tail, shared * PAGE_SIZE, [*range(shared), *own][:NUM_PAGES]))
    parts[3] = (parts[3][0], 0, parts[3][2][shared:])
    members = tuple(i for i in range(len(lengths)) if i != 3)
    batch = make_batch(parts, PAGE_SIZE)
    hints = (
        (),
        (PrefixGroup(members, shared),),
        (PrefixGroup(members[:4], shared - 2), PrefixGroup(members[4:], shared)),
        (PrefixGroup(tuple(range(len(lengths))), shared),),
        (PrefixGroup(members, NUM_PAGES),),
    )
    kv = prefix(backend, model, dtype, len(lengths))
    expected = full(backend, model, kv, batch)
    assert np.isfinite(expected).all()
    for groups in hints:
        hinted = replace(batch, groups=groups)
        np.testing.assert_array_equal(full(backend, model, kv, hinted), expected)


def test_recomputed_last_token(
    backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    """Slot -1: the token's key and value are read from the page, which stays as it is."""
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), NUM_PAGES)
    count = 300
    full(backend, model, kv, make_batch([(TOKENS[:count], 0, range(NUM_PAGES))], PAGE_SIZE))
    before = [backend.export_page(kv, page) for page in range(NUM_PAGES)]
    last = make_batch([(TOKENS[count - 1 : count], count - 1, range(NUM_PAGES))], PAGE_SIZE)
    batch = replace(last, slot_mapping=np.array([-1], dtype=np.int32))
    np.testing.assert_array_equal(full(backend, model, kv, batch), whole[count - 1 : count])
    assert [backend.export_page(kv, page) for page in range(NUM_PAGES)] == before


@pytest.mark.parametrize("num_top", [1, 5, 64, 133])
def test_top_logits_are_those_of_the_full_row(
    num_top: int, backend: CpuBackend, model: CpuModel, dtype: KVDType, whole: Float32Array
) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC, PAGE_SIZE, dtype), NUM_PAGES)
    rows = [0, 17, 559, 17]
    batch = make_batch([(TOKENS, 0, range(NUM_PAGES))], PAGE_SIZE, logit_rows=rows, num_top=num_top)
    result = backend.step(model, kv, batch)
    expected = whole[rows]
    order = np.argsort(-expected, axis=1, kind="stable")[:, :num_top]
    assert result.full is None
    assert result.logsumexp is not None
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_array_equal(result.top_logits, np.take_along_axis(expected, order, axis=1))
    wide = expected.astype(np.float64)
    np.testing.assert_allclose(
        result.logsumexp, np.log(np.exp(wide).sum(axis=1)), rtol=2e-6, atol=2e-6
    )

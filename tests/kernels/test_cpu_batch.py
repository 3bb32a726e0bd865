"""A batch on its way into the native library: what is refused, and what goes on meanwhile."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.contract import (
    ContractError,
    ForwardBatch,
    KVDType,
    PrefixGroup,
    StepLogits,
    WeightType,
    check_batch,
)
from kernels.cpu.backend import CpuBackend, CpuKVPool, CpuModel
from kernels.random_weights import random_weights
from tests.kernels.small_decoder import SPEC, all_of
from tests.kernels.stepping import kv_layout, make_batch

LAYOUT = kv_layout(SPEC, 16, KVDType.F16)
NUM_PAGES = 6
ARRAYS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "cu_seqlens_q",
    "seq_lens",
    "logit_rows",
    "page_table",
)


@pytest.fixture(scope="module", params=[1, 2])
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=request.param, exact=True)
    yield backend
    backend.close()


@pytest.fixture
def model(backend: CpuBackend) -> CpuModel:
    weights = random_weights(SPEC, np.random.default_rng(0), all_of(WeightType.F32))
    return backend.load(SPEC, weights)


@pytest.fixture
def kv(backend: CpuBackend) -> CpuKVPool:
    pool = backend.alloc_kv(LAYOUT, NUM_PAGES)
    for page in range(NUM_PAGES):
        backend.import_page(pool, page, bytes(LAYOUT.page_bytes))
    return pool


def three_sequences(num_top: int = 1) -> ForwardBatch:
    parts = [([5], 20, [0, 3]), ([7, 8, 9], 15, [0, 4]), ([2], 31, [0, 5])]
    batch = make_batch(parts, 16, logit_rows=[0, 3, 4], num_top=num_top)
    return replace(batch, groups=(PrefixGroup((0, 2), 1),))


def is_good(batch: ForwardBatch) -> bool:
    try:
        check_batch(batch, SPEC, LAYOUT, NUM_PAGES)
    except ContractError:
        return False
    return True


def test_what_the_plain_check_refuses_is_refused(
    backend: CpuBackend, model: CpuModel, kv: CpuKVPool
) -> None:
    rng = np.random.default_rng(1)
    good = three_sequences()
    refused = 0
    for _ in range(1500):
        name = ARRAYS[rng.integers(len(ARRAYS))]
        array = getattr(good, name).copy()
        near = int(rng.choice(array.reshape(-1))) + int(rng.integers(-2, 3))
        wild = int(rng.choice([-(2**31), -1, 0, SPEC.vocab_size, 2**31 - 1]))
        array.reshape(-1)[rng.integers(array.size)] = near if rng.random() < 0.7 else wild
        changed: dict[str, Any] = {name: array}
        batch = replace(good, **changed)
        if is_good(batch):
            backend.step(model, kv, batch)
            continue
        refused += 1
        with pytest.raises(ContractError):
            backend.step(model, kv, batch)
    assert 500 < refused < 1500


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("fault", ["dtype", "dimensions", "length"])
def test_shapes_and_dtypes_are_refused_by_name(
    backend: CpuBackend, model: CpuModel, kv: CpuKVPool, name: str, fault: str
) -> None:
    array = getattr(three_sequences(), name)
    bad = {
        "dtype": array.astype(np.int64),
        "dimensions": array[None],
        "length": np.concatenate([array, array]),
    }[fault]
    changed: dict[str, Any] = {name: bad}
    batch = replace(three_sequences(), **changed)
    if is_good(batch):
        assert (name, fault) == ("logit_rows", "length")
        return
    with pytest.raises(ContractError) as refusal:
        backend.step(model, kv, batch)
    with pytest.raises(ContractError, match=str(refusal.value)):
        check_batch(batch, SPEC, LAYOUT, NUM_PAGES)


def bits(logits: StepLogits) -> list[bytes]:
    parts = (logits.full, logits.top_ids, logits.top_logits, logits.logsumexp)
    return [part.tobytes() for part in parts if part is not None]


@pytest.mark.parametrize("num_top", [0, 3])
def test_something_meanwhile_changes_nothing(
    backend: CpuBackend, model: CpuModel, kv: CpuKVPool, num_top: int
) -> None:
    batch = three_sequences(num_top)
    alone = bits(backend.step(model, kv, batch))
    called: list[int] = []
    assert bits(backend.step(model, kv, batch, lambda: called.append(1))) == alone
    assert called == [1]

    def fail() -> None:
        raise RuntimeError("meanwhile")

    with pytest.raises(RuntimeError, match="meanwhile"):
        backend.step(model, kv, batch, fail)
    assert bits(backend.step(model, kv, batch)) == alone


def test_a_step_prepared_while_another_runs_has_the_tokens_it_is_given_then(
    backend: CpuBackend, model: CpuModel, kv: CpuKVPool
) -> None:
    """It is longer, so that memory of steps grows between them."""
    first, long = three_sequences(), make_batch([(list(range(30)), 0, [1, 2])], 16, num_top=2)
    fresh = make_batch([(list(range(7, 37)), 0, [1, 2])], 16, num_top=2)
    expected = [bits(backend.step(model, kv, batch)) for batch in (first, fresh)]
    before = backend.step(model, kv, first, lambda: backend.prepare(model, kv, long))
    long.token_ids[:] = fresh.token_ids
    assert [bits(before), bits(backend.step(model, kv, long))] == expected
    backend.prepare(model, kv, long)
    assert bits(backend.step(model, kv, first)) == expected[0]


def test_tokens_outside_the_vocabulary_are_refused_after_the_batch_was_prepared(
    backend: CpuBackend, model: CpuModel, kv: CpuKVPool
) -> None:
    batch = three_sequences()
    alone = bits(backend.step(model, kv, batch))
    backend.prepare(model, kv, batch)
    wrong = SPEC.vocab_size
    kept, batch.token_ids[1] = batch.token_ids[1], wrong
    with pytest.raises(ContractError, match="token_ids"):
        backend.step(model, kv, batch)
    batch.token_ids[1] = kept
    assert bits(backend.step(model, kv, batch)) == alone

"""The whole step under the interpreter against the reference: the same greedy tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kernels.contract import (
    ContractError,
    DecoderSpec,
    DecoderWeights,
    Float32Array,
    KVDType,
    PrefixGroup,
    Weight,
    WeightType,
)
from kernels.random_weights import random_weights
from kernels.reference import ReferenceBackend
from kernels.triton.backend import TritonBackend
from tests.kernels.small_decoder import SPEC, WeightTypes, all_of
from tests.kernels.stepping import kv_layout, make_batch

TINY = replace(SPEC, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)
F32 = all_of(WeightType.F32)


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    spec: DecoderSpec = TINY
    optional: tuple[str, ...] = ()
    types: WeightTypes = F32
    tied: bool = True
    page_size: int = 16

    def weights(self) -> DecoderWeights:
        rng = np.random.default_rng(3)
        return random_weights(self.spec, rng, self.types, self.optional, self.tied)


FAMILIES = (
    Family("llama", types=all_of(WeightType.Q4_1)),
    Family("mistral", replace(TINY, sliding_window=(4, 4), num_kv_heads=1), page_size=32),
    Family("qwen2", optional=("q_bias", "k_bias", "v_bias"), page_size=64),
    Family("qwen3", replace(TINY, head_dim=32), ("q_norm", "k_norm"), tied=False),
    Family("biases", optional=("q_bias", "o_bias"), types=all_of(WeightType.BF16)),
    Family("windows", replace(TINY, sliding_window=(3, 0))),
    Family("partial rotary", replace(TINY, rope_inv_freq=(1.0, 0.2, 0.03), rope_scale=1.2)),
    Family("no rotary", replace(TINY, rope_inv_freq=())),
    Family("group of 3", replace(TINY, num_heads=6)),
    Family("wide head", replace(TINY, num_heads=2, num_kv_heads=1, head_dim=160)),
)


def greedy(
    backend: Any, weights: DecoderWeights, family: Family, dtype: KVDType
) -> tuple[list[int], Float32Array]:
    """Tokens and logits of two sequences: one step of both prompts, the second cut in chunks that
    mix with decodes, then decodes alone."""
    model = backend.load(family.spec, weights)
    kv = backend.alloc_kv(kv_layout(family.spec, family.page_size, dtype), 4)
    if backend.name == "triton":
        poison(backend, kv)
    rng = np.random.default_rng(5)
    first, second = (rng.integers(0, family.spec.vocab_size, size).tolist() for size in (5, 7))
    pages: tuple[Sequence[int], Sequence[int]] = ([2], [3, 1])
    tokens: list[int] = []
    rows = []
    ends = (3, 6, 7, 8)
    begin, start = 0, 0
    for end in ends:
        parts = [(first[start:], start, pages[0]), (second[begin:end], begin, pages[1])]
        last = len(first) - start - 1
        batch = make_batch(parts, family.page_size, logit_rows=[last, last + end - begin])
        full = backend.step(model, kv, batch).full
        rows.append(full)
        chosen = full.argmax(axis=1).tolist()
        tokens += chosen
        start, begin = len(first), end
        first.append(chosen[0])
        if end >= 7:
            second.append(chosen[1])
    return tokens, np.concatenate(rows)


def poison(backend: TritonBackend, kv: Any) -> None:
    """NaN in every element and scale that can hold one."""
    for part in kv.parts:
        part.fill_(float("nan") if part.dtype.is_floating_point else 127)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_tokens_equal_the_reference(family: Family) -> None:
    weights = family.weights()
    tokens, logits = greedy(TritonBackend(exact=True), weights, family, KVDType.F32)
    wanted, reference = greedy(ReferenceBackend(), weights, family, KVDType.F32)
    assert np.abs(logits - reference).max() < 1e-4
    assert tokens == wanted


@pytest.mark.parametrize("dtype", [KVDType.BF16, KVDType.E4M3])
def test_bfloat16_is_near_the_reference(dtype: KVDType) -> None:
    """Logits of a deviation of about 1, over weights that bfloat16 holds exactly."""
    family = Family("llama", types=all_of(WeightType.BF16))
    weights = family.weights()
    _, logits = greedy(TritonBackend(), weights, family, dtype)
    _, reference = greedy(ReferenceBackend(), weights, family, dtype)
    difference = logits[:4] - reference[:4]  # before a token may differ and change what follows
    assert np.sqrt(np.square(difference).mean()) < 0.03


def test_the_largest_logits_come_in_the_same_order_with_ties() -> None:
    shape = (TINY.vocab_size, TINY.hidden_size)
    zeros = np.zeros((shape[0], 4 * shape[1]), dtype=np.uint8)
    head = Weight("head", WeightType.F32, shape, zeros)
    weights = replace(FAMILIES[0].weights(), head=head)
    triton, reference = TritonBackend(exact=True), ReferenceBackend()
    results = []
    for backend in (triton, reference):
        one: Any = backend
        kv = one.alloc_kv(kv_layout(TINY), 1)
        batch = make_batch([([1, 2], 0, [0])], 16, num_top=5)
        results.append(one.step(one.load(TINY, weights), kv, batch))
    assert results[0].top_ids.tolist() == results[1].top_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert np.allclose(results[0].logsumexp, results[1].logsumexp, atol=1e-5)
    assert np.allclose(results[0].top_logits, results[1].top_logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [KVDType.F32, KVDType.I8, KVDType.E5M2])
def test_pages_move_between_backends_and_a_group_attends_once(dtype: KVDType) -> None:
    """Pages that the reference filled are read by the kernels; three sequences share 256 tokens."""
    reference, weights = ReferenceBackend(), FAMILIES[0].weights()
    judge = reference.load(TINY, weights)
    layout = kv_layout(TINY, 64, dtype)
    filled = reference.alloc_kv(layout, 8)
    prompt = np.random.default_rng(7).integers(0, TINY.vocab_size, 256).tolist()
    reference.step(judge, filled, make_batch([(prompt, 0, [5, 2, 7, 0])], 64, logit_rows=[]))
    parts = [
        ([9], 256, [5, 2, 7, 0, 1]),
        ([8, 3], 256, [5, 2, 7, 0, 3]),
        ([4], 256, [5, 2, 7, 0, 4]),
    ]
    batch = make_batch(parts, 64)
    grouped = replace(batch, groups=(PrefixGroup((0, 1, 2), 4),))
    results = []
    for backend in (TritonBackend(exact=True), TritonBackend(exact=True, cascade=False)):
        kv = backend.alloc_kv(layout, 8)
        poison(backend, kv)
        for page in (0, 2, 5, 7):
            backend.import_page(kv, page, reference.export_page(filled, page))
            assert backend.export_page(kv, page) == reference.export_page(filled, page)
        results.append(backend.step(backend.load(TINY, weights), kv, grouped).full)
    wanted = reference.step(judge, filled, batch).full
    assert wanted is not None and results[0] is not None and results[1] is not None
    bound = 2e-4 if dtype is KVDType.F32 else 2e-2
    assert np.abs(results[0] - wanted).max() < bound
    assert np.abs(results[1] - wanted).max() < bound
    assert not np.array_equal(results[0], results[1])


def test_copies_of_pages_are_whole() -> None:
    backend = TritonBackend()
    kv = backend.alloc_kv(kv_layout(TINY, 16, KVDType.I8), 4)
    data = np.random.default_rng(0).integers(0, 256, kv.layout.page_bytes, dtype=np.uint8)
    backend.import_page(kv, 2, data.tobytes())
    backend.copy_pages(kv, np.array([2, 2], np.int32), np.array([0, 3], np.int32))
    assert backend.export_page(kv, 0) == backend.export_page(kv, 3) == data.tobytes()


def test_arguments_outside_the_contract_are_named() -> None:
    backend = TritonBackend()
    kv = backend.alloc_kv(kv_layout(TINY, 16, KVDType.BF16), 2)
    model = backend.load(TINY, FAMILIES[0].weights())
    poison(backend, kv)
    with pytest.raises(ContractError, match="page_table has a page outside"):
        backend.step(model, kv, make_batch([([1], 0, [2])], 16))
    with pytest.raises(ContractError, match="token_ids"):
        backend.step(model, kv, make_batch([([TINY.vocab_size], 0, [0])], 16))
    assert bool(kv.pages.isnan().all())
    with pytest.raises(ContractError, match="dst: a page"):
        backend.copy_pages(kv, np.array([0], np.int32), np.array([2], np.int32))
    with pytest.raises(ContractError, match="dst names a page twice"):
        backend.copy_pages(kv, np.array([0, 0], np.int32), np.array([1, 1], np.int32))
    with pytest.raises(ContractError, match="data: 3 bytes"):
        backend.import_page(kv, 0, b"abc")
    with pytest.raises(ContractError, match="head_dim: 20 elements"):
        backend.alloc_kv(replace(kv_layout(TINY, 16, KVDType.F16), head_dim=20), 1)


def test_the_numeric_mode_says_what_decides_bits() -> None:
    modes = {
        TritonBackend(exact=exact, cascade=cascade).numeric_mode
        for exact in (False, True)
        for cascade in (False, True)
    }
    assert len(modes) == 4
    assert "triton-interpreted-bf16" in modes

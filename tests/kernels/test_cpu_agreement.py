"""The CPU backend against the reference, over storages, head shapes and optional parts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kernels.contract import DecoderSpec, DecoderWeights, Float32Array, KVDType, WeightType
from kernels.cpu.backend import CpuBackend
from kernels.cpu.build import instruction_sets, read_cpu_flags
from kernels.random_weights import OPTIONAL, random_weights
from kernels.reference import ReferenceBackend
from tests.kernels.small_decoder import SPEC, WeightTypes, all_of
from tests.kernels.stepping import kv_layout, make_batch

SETS = instruction_sets(read_cpu_flags())
BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
Q4_1 = all_of(WeightType.Q4_1)


def mixed(name: str) -> WeightType:
    """Matrices that share an input and want it in different forms."""
    types = {"v": WeightType.Q8_0, "k": WeightType.F16, "up": WeightType.Q4_0}
    return types.get(name, WeightType.Q4_1)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    spec: DecoderSpec = SPEC
    types: WeightTypes = Q4_1
    optional: tuple[str, ...] = ()
    tied: bool = True
    page_size: int = 16
    dtype: KVDType = KVDType.F16

    def weights(self) -> DecoderWeights:
        return random_weights(
            self.spec, np.random.default_rng(3), self.types, self.optional, self.tied
        )


BLOCKS_OF_256 = replace(SPEC, hidden_size=256, intermediate_size=512, num_heads=16)
KEYS_OF_128 = replace(SPEC, num_heads=4, head_dim=128)

CASES = (
    *(
        Case(type_.value, SPEC if type_.block_size < 256 else BLOCKS_OF_256, all_of(type_))
        for type_ in WeightType
    ),
    Case("mixed storages, own head", types=mixed, tied=False),
    Case("every optional part", optional=OPTIONAL),
    Case("biases", types=all_of(WeightType.F32), optional=BIASES),
    Case("windows", spec=replace(SPEC, sliding_window=(37, 0))),
    Case("window across key blocks", spec=replace(SPEC, sliding_window=(0, 290))),
    Case("window of one", spec=replace(SPEC, sliding_window=(1, 5)), types=mixed),
    Case("partial rotary", spec=replace(SPEC, rope_inv_freq=(1.0, 0.2, 0.03), rope_scale=1.2)),
    Case("no rotary", spec=replace(SPEC, rope_inv_freq=())),
    Case("one kv head", spec=replace(SPEC, num_kv_heads=1)),
    Case("no grouping", spec=replace(SPEC, num_kv_heads=6)),
    Case("group of 7", spec=replace(SPEC, num_heads=14, head_dim=32), optional=("k_norm",)),
    Case("group of 32", spec=replace(SPEC, num_heads=32, num_kv_heads=1)),
    Case("wide heads", spec=replace(SPEC, num_heads=2, num_kv_heads=1, head_dim=160)),
    Case("heads of 128", spec=KEYS_OF_128, page_size=32),
    Case("head_dim 40", spec=replace(SPEC, num_heads=4, head_dim=40)),
    Case(
        "sizes of no vector's multiple",
        spec=replace(SPEC, hidden_size=90, intermediate_size=77),
        types=all_of(WeightType.BF16),
        optional=OPTIONAL,
        tied=False,
    ),
    Case("codes", dtype=KVDType.I8, types=mixed),
    Case("codes, heads of 128", KEYS_OF_128, dtype=KVDType.I8, page_size=32),
    Case("codes, head_dim 40", replace(SPEC, num_heads=4, head_dim=40), dtype=KVDType.I8),
    Case("codes, windows", replace(SPEC, sliding_window=(37, 290)), dtype=KVDType.I8, page_size=64),
    Case("codes, page of 1", dtype=KVDType.I8, page_size=1),
    Case("codes, page of 8", dtype=KVDType.I8, page_size=8, optional=OPTIONAL),
    Case("bf16", dtype=KVDType.BF16, types=mixed),
    Case("bf16, heads of 128", KEYS_OF_128, dtype=KVDType.BF16, page_size=32),
    Case("bf16, head_dim 40", replace(SPEC, num_heads=4, head_dim=40), dtype=KVDType.BF16),
    Case(
        "bf16, windows", replace(SPEC, sliding_window=(37, 290)), dtype=KVDType.BF16, page_size=64
    ),
    Case("bf16, window of one", replace(SPEC, sliding_window=(1, 2)), dtype=KVDType.BF16),
    Case("bf16, page of 2", dtype=KVDType.BF16, page_size=2),
    Case("bf16, page of 8", dtype=KVDType.BF16, page_size=8, optional=OPTIONAL),
    Case("page of 1", page_size=1),
    Case("page of 4", page_size=4, types=mixed),
    Case("page of 8", page_size=8),
    Case("page of 64", page_size=64, spec=replace(SPEC, sliding_window=(0, 37))),
)


def ragged_steps(backend: Any, case: Case) -> Float32Array:
    """Logits of all tokens of three sequences, chunks and decodes mixed, in one pool."""
    rng = np.random.default_rng(5)
    lengths = (343, 60, 300)
    tokens = [rng.integers(0, case.spec.vocab_size, length).tolist() for length in lengths]
    num_pages = [-(-length // case.page_size) for length in lengths]
    order = rng.permutation(sum(num_pages))
    pages = np.split(order, np.cumsum(num_pages)[:-1])
    model = backend.load(case.spec, case.weights())
    kv = backend.alloc_kv(kv_layout(case.spec, case.page_size, case.dtype), sum(num_pages))
    poison = b"\xff" * kv.layout.page_bytes  # NaN as elements of float16, or as scales
    for page in range(kv.num_pages):
        backend.import_page(kv, page, poison)
    rows = []
    for spans in (
        ((0, 0, 300), (1, 0, 7)),
        ((1, 7, 8), (0, 300, 342), (2, 0, 250)),
        ((0, 342, 343), (2, 250, 299), (1, 8, 9)),
        ((2, 299, 300), (1, 9, 60)),
    ):
        parts = [(tokens[s][begin:end], begin, pages[s].tolist()) for s, begin, end in spans]
        full = backend.step(model, kv, make_batch(parts, case.page_size)).full
        rows.append(full)
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def reference() -> ReferenceBackend:
    return ReferenceBackend(threads=1)


@pytest.fixture(scope="module", params=[False, True], ids=["default", "exact"])
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2, exact=request.param)
    yield backend
    backend.close()


@pytest.mark.skipif(len(SETS) < 2, reason="this processor runs AVX2 alone")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_instruction_sets_agree_in_every_bit(case: Case, backend: CpuBackend) -> None:
    """The best, which runs unless another is asked for, and those below it."""
    exact = backend.numeric_mode.endswith("exact")
    expected = ragged_steps(backend, case)
    for isa in SETS[:-1]:
        other = CpuBackend(threads=1, exact=exact, isa=isa)
        np.testing.assert_array_equal(ragged_steps(other, case), expected)
        other.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_agree(case: Case, backend: CpuBackend, reference: ReferenceBackend) -> None:
    """Exact: float32 rounding, and rounding of keys and values that falls the other way. Default:
    also the rounding of activations to 8 bits. Weights in formats without kernels of their own are
    rounded once more, and so are queries and attention weights over bfloat16 pages."""
    expected = ragged_steps(reference, case)
    error = ragged_steps(backend, case) - expected
    relative = np.linalg.norm(error, axis=1) / np.linalg.norm(expected, axis=1)
    exact = backend.numeric_mode.endswith("exact")
    rounded = case.name in ("q5_1", "q4_k", "q5_k", "q6_k") or case.dtype is KVDType.BF16
    assert relative.max() < (1.5e-3 if exact and not rounded else 0.1)
    assert relative.mean() < (5e-5 if exact and not rounded else 3e-2)

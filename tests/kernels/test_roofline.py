"""Operations and bytes of a step, against counts by hand and by brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.bench import SMOL as SPEC
from kernels.contract import DecoderSpec, KVDType, KVLayout, WeightType
from kernels.limits import limits
from kernels.peaks import Peaks
from kernels.random_weights import random_weights
from kernels.roofline import (
    OPS,
    BatchShape,
    Cost,
    StepCosts,
    WeightBytes,
    kv_token_bytes,
    op_costs,
    visible_keys,
    visible_pairs,
)

LLAMA_3_70B = DecoderSpec(
    family="llama",
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_context=8192,
    norm_eps=1e-5,
    rope_inv_freq=(1.0,) * 64,
)
KV = KVLayout(30, 3, 64, 16)


def storage(name: str) -> WeightType:
    """The embedding, which is the head too, in 8 bits, the rest in 4."""
    return WeightType.Q8_0 if name == "embedding" else WeightType.Q4_1


def bf16(name: str) -> WeightType:
    return WeightType.BF16


def test_kv_of_llama_3_70b_is_two_and_a_half_gib_at_8192_tokens() -> None:
    layout = KVLayout(80, 8, 128, 16, KVDType.BF16)
    assert kv_token_bytes(layout) == 2 * 2 * 80 * 8 * 128
    assert kv_token_bytes(layout) * 8192 == 2.5 * 2**30


def test_weights_of_llama_3_70b() -> None:
    weights = WeightBytes.stored_as(LLAMA_3_70B, bf16)
    layer = 8192 * 8192 * 2 + 8192 * 1024 * 2 + 3 * 8192 * 28672
    matrices = 80 * layer + 2 * 128256 * 8192
    vectors = (80 * 2 + 1) * 8192
    assert weights.total == 2 * matrices + 4 * vectors
    assert matrices + vectors == 70_553_706_496  # the checkpoint's own count


def test_a_decode_step_by_hand() -> None:
    """Two sequences with 100 and 300 keys, one new token and one row of logits each."""
    weights = WeightBytes.stored_as(SPEC, storage, tied=True)
    costs = op_costs(SPEC, BatchShape(((1, 100), (1, 300)), 2), weights, KV)
    assert set(costs) == set(OPS)
    q4 = 20 / 32  # bytes of an element
    assert costs["qkv"] == Cost(
        2 * 2 * 576 * (576 + 192 + 192) * 30,
        int(576 * 960 * 30 * q4),
        2 * (576 + 960) * 30 * 4,
    )
    assert costs["o"].flops == 2 * 2 * 576 * 576 * 30
    assert costs["gate_up"].flops == 2 * 2 * 576 * 3072 * 30
    assert costs["down"].memory_bytes == int(1536 * 576 * 30 * q4)
    assert costs["attention"].flops == 4 * (100 + 300) * 576 * 30
    assert costs["attention"].memory_bytes == (100 + 300) * 2 * 192 * 2 * 30
    assert costs["kv_write"].memory_bytes == 2 * 2 * 192 * 2 * 30
    assert costs["head"].flops == 2 * 2 * 576 * 49152
    assert costs["head"].memory_bytes == 49152 * 576 // 32 * 34
    assert costs["embed"].memory_bytes == 2 * 576 // 32 * 34
    assert costs["norm"].memory_bytes == 61 * 576 * 4


def test_weights_count_the_same_from_shapes_and_from_what_is_stored() -> None:
    spec = replace(SPEC, num_layers=2, vocab_size=256)
    for tied in (True, False):
        for optional in ((), ("q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm")):
            rng = np.random.default_rng(0)
            made = random_weights(spec, rng, storage, optional, tied)
            stated = WeightBytes.stored_as(spec, storage, optional=optional, tied=tied)
            assert WeightBytes.of(made) == stated


def test_without_rows_of_logits_the_head_is_not_read() -> None:
    weights = WeightBytes.stored_as(SPEC, storage, tied=True)
    assert op_costs(SPEC, BatchShape(((64, 64),), 0), weights, KV)["head"] == Cost()


@given(new=st.integers(1, 40), before=st.integers(0, 60), window=st.integers(0, 70))
def test_pairs_and_keys_against_brute_force(new: int, before: int, window: int) -> None:
    context = new + before
    seen = [
        {key for key in range(query + 1) if not window or key > query - window}
        for query in range(before, context)
    ]
    assert visible_pairs(new, context, window) == sum(map(len, seen))
    assert visible_keys(new, context, window) == len(set().union(*seen))


@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 200)).map(lambda s: (s[0], s[0] + s[1])),
        min_size=1,
        max_size=5,
    ),
    rows=st.integers(0, 5),
    windows=st.sampled_from([None, (0, 16, 0), (16, 16, 64)]),
    dtype=st.sampled_from(list(KVDType)),
)
def test_a_step_is_the_sum_of_its_ops(
    sequences: list[tuple[int, int]],
    rows: int,
    windows: tuple[int, ...] | None,
    dtype: KVDType,
) -> None:
    spec = replace(SPEC, num_layers=3, sliding_window=windows)
    kv = KVLayout(3, 3, 64, 16, dtype)
    weights = WeightBytes.stored_as(spec, storage, tied=True)
    ops = op_costs(spec, BatchShape(tuple(sequences), rows), weights, kv)
    total = sum(ops.values(), Cost())
    assert StepCosts(spec, weights, kv).cost(sequences, rows) == (total.flops, total.memory_bytes)


def test_intensity_grows_with_the_batch() -> None:
    weights = WeightBytes.stored_as(SPEC, storage, tied=True)
    shapes = [BatchShape(((1, 512),) * batch, batch) for batch in (1, 8, 16)]
    shapes.append(BatchShape(((512, 512),), 1))
    found = [sum(op_costs(SPEC, s, weights, KV).values(), Cost()).intensity for s in shapes]
    assert found == sorted(found) and found[0] < 4 < 100 < found[-1]


@pytest.mark.parametrize("bytes_", [0, 10])
def test_intensity_is_flops_per_byte(bytes_: int) -> None:
    assert Cost(40, bytes_).intensity == (40 / bytes_ if bytes_ else float("inf"))


def test_a_machine_allows_what_its_slower_side_allows() -> None:
    slow_memory = limits(Peaks(1e9, 1e15), 128, [1, 16])
    slow_arithmetic = limits(Peaks(1e15, 1e9), 128, [1, 16])
    # The weights of 96.6 MB are read once for all 16, the products are computed for each.
    assert 1 / slow_memory[1] == pytest.approx(0.0966 + 128 * 23040 / 1e9, rel=0.01)
    assert 10 < slow_memory[16] / slow_memory[1] < 16
    assert slow_arithmetic[16] == pytest.approx(slow_arithmetic[1])

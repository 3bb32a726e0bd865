"""The reference backend: each op against its formula, and the laws of the contract."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.contract import (
    ContractError,
    DecoderSpec,
    DecoderWeights,
    ForwardBatch,
    KVDType,
    LayerWeights,
    Weight,
    WeightType,
)
from kernels.reference import (
    ReferenceBackend,
    ReferenceKVPool,
    ReferenceModel,
    attention,
    rms_norm,
    rope,
    rope_table,
    silu_mul,
)
from tests.kernels.stepping import all_logits, kv_layout, make_batch

SPEC = DecoderSpec(
    family="llama",
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    max_context=128,
    norm_eps=1e-5,
    rope_inv_freq=(1.0, 0.3, 0.05),
    rope_scale=1.1,
    sliding_window=(0, 11),
)
TOKENS = np.random.default_rng(2).integers(0, SPEC.vocab_size, 45).tolist()


def random_weights(spec: DecoderSpec, seed: int = 0) -> DecoderWeights:
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> Weight:
        values = (rng.normal(size=shape) * 0.4).astype(np.float32)
        rows = shape[0] if len(shape) == 2 else 1
        return Weight(name, WeightType.F32, shape, values.view(np.uint8).reshape(rows, -1))

    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=weight("attn_norm", hidden),
            q=weight("q", q, hidden),
            k=weight("k", kv, hidden),
            v=weight("v", kv, hidden),
            o=weight("o", hidden, q),
            mlp_norm=weight("mlp_norm", hidden),
            gate=weight("gate", mlp, hidden),
            up=weight("up", mlp, hidden),
            down=weight("down", hidden, mlp),
            q_bias=weight("q_bias", q),
            o_bias=weight("o_bias", hidden),
            k_norm=weight("k_norm", spec.head_dim),
        )
        for _ in range(spec.num_layers)
    )
    embedding = weight("embedding", spec.vocab_size, hidden)
    return DecoderWeights(embedding, layers, weight("final_norm", hidden))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def backend() -> ReferenceBackend:
    return ReferenceBackend(threads=1)


@pytest.fixture(scope="module")
def model(backend: ReferenceBackend) -> ReferenceModel:
    return backend.load(SPEC, random_weights(SPEC))


def full(backend: ReferenceBackend, model: Any, kv: Any, batch: ForwardBatch) -> Any:
    logits = backend.step(model, kv, batch).full
    assert logits is not None
    return logits


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    for row, got in zip(x.tolist(), rms_norm(x, weight, 1e-3).tolist(), strict=True):
        scale = 1 / math.sqrt(sum(value**2 for value in row) / 8 + 1e-3)
        expected = [value * scale * w for value, w in zip(row, weight.tolist(), strict=True)]
        assert got == pytest.approx(expected, rel=1e-5)


def test_silu_mul() -> None:
    gate, up = torch.tensor([-2.0, 0.0, 3.0]), torch.tensor([1.5, 2.0, -1.0])
    expected = [-2 / (1 + math.exp(2)) * 1.5, 0.0, -3 / (1 + math.exp(-3))]
    assert silu_mul(gate, up).tolist() == pytest.approx(expected, rel=1e-6)


def test_rope_turns_pairs_of_halves() -> None:
    """Element i and i + 3 are one complex number; elements from 6 on stay."""
    x = torch.randn(4, 2, 8)
    positions = torch.tensor([0, 1, 7, 100])
    got = rope(x, *rope_table(SPEC, positions))
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            values = x[t, head].tolist()
            for i, inv_freq in enumerate(SPEC.rope_inv_freq):
                turn = complex(math.cos(position * inv_freq), math.sin(position * inv_freq))
                expected = complex(values[i], values[i + 3]) * turn * SPEC.rope_scale
                actual = complex(got[t, head, i].item(), got[t, head, i + 3].item())
                assert actual == pytest.approx(expected, abs=1e-5)
            assert got[t, head, 6:].tolist() == values[6:]


def test_attention_of_grouped_heads() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    visible = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    got = attention(q, k, v, visible).view(3, 4, 8)
    for t in range(3):
        keys = [i for i in range(5) if visible[t, i]]
        for head in range(4):
            scores = [float(q[t, head] @ k[head // 2, i]) / math.sqrt(8) for i in keys]
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(w * v[head // 2, i].numpy() for w, i in zip(weights, keys, strict=True))
            assert got[t, head].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", [(1,) * 44, (16, 16), (3, 30, 1, 5)])
def test_chunks_and_page_sizes_change_nothing(
    backend: ReferenceBackend, model: ReferenceModel, page_size: int, chunks: tuple[int, ...]
) -> None:
    whole = all_logits(backend, model, TOKENS)
    parts = all_logits(backend, model, TOKENS, chunks=chunks, page_size=page_size)
    assert np.abs(parts - whole).max() < 1e-4


def test_neighbours_change_nothing(backend: ReferenceBackend, model: ReferenceModel) -> None:
    """A prefill, a later chunk and a decode in one step, each as when alone."""
    alone = all_logits(backend, model, TOKENS)
    other = all_logits(backend, model, TOKENS[::-1])
    kv = backend.alloc_kv(kv_layout(SPEC, 4), 40)
    a, b, c = range(12), range(30, 18, -1), range(39, 30, -1)
    backend.step(model, kv, make_batch([(TOKENS[:9], 0, a), (TOKENS[::-1][:20], 0, b)], 4))
    parts = [(TOKENS[9:30], 9, a), (TOKENS[::-1][20:21], 20, b), (TOKENS[:13], 0, c)]
    mixed = full(backend, model, kv, make_batch(parts, 4))
    expected = np.concatenate([alone[9:30], other[20:21], alone[:13]])
    assert np.abs(mixed - expected).max() < 1e-4


def test_slot_minus_one_reads_and_does_not_write(
    backend: ReferenceBackend, model: ReferenceModel
) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC), 3)
    first = full(backend, model, kv, make_batch([(TOKENS, 0, [2, 0, 1])], 16))
    before = [backend.export_page(kv, page) for page in range(3)]
    again = make_batch([([(TOKENS[-1] + 1) % 50], 44, [2, 0, 1])], 16)
    again = replace(again, slot_mapping=np.array([-1], dtype=np.int32))
    other_token = full(backend, model, kv, again)
    assert [backend.export_page(kv, page) for page in range(3)] == before
    same = replace(again, token_ids=np.array(TOKENS[-1:], dtype=np.int32))
    assert np.abs(full(backend, model, kv, same)[0] - first[-1]).max() < 1e-4
    assert np.abs(other_token[0] - first[-1]).max() > 0.1


def test_only_the_pages_of_the_table_change(
    backend: ReferenceBackend, model: ReferenceModel
) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC), 5)
    before = [backend.export_page(kv, page) for page in range(5)]
    backend.step(model, kv, make_batch([(TOKENS[:20], 0, [3, 1])], 16))
    after = [backend.export_page(kv, page) for page in range(5)]
    assert [page for page in range(5) if before[page] != after[page]] == [1, 3]


def test_pages_outside_every_window_are_not_read(backend: ReferenceBackend) -> None:
    spec = replace(SPEC, sliding_window=(11, 11))
    model = backend.load(spec, random_weights(spec))
    expected = all_logits(backend, model, TOKENS)
    kv = backend.alloc_kv(kv_layout(spec, 4), 13)
    backend.step(model, kv, make_batch([(TOKENS[:40], 0, range(12))], 4))
    table = [12] * 7 + list(range(7, 12))
    got = full(backend, model, kv, make_batch([(TOKENS[40:], 40, table)], 4))
    assert np.abs(got - expected[40:]).max() < 1e-4


def test_wanted_rows_and_top_logits(backend: ReferenceBackend, model: ReferenceModel) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC), 3)
    everything = full(backend, model, kv, make_batch([(TOKENS, 0, range(3))], 16))
    rows = [44, 3, 3]
    some = full(backend, model, kv, make_batch([(TOKENS, 0, range(3))], 16, logit_rows=rows))
    assert np.abs(some - everything[rows]).max() < 1e-5
    none = full(backend, model, kv, make_batch([(TOKENS, 0, range(3))], 16, logit_rows=[]))
    assert none.shape == (0, SPEC.vocab_size)
    batch = make_batch([(TOKENS, 0, range(3))], 16, logit_rows=rows, num_top=5)
    top = backend.step(model, kv, batch)
    assert top.full is None and top.top_ids is not None
    assert top.top_logits is not None and top.logsumexp is not None
    assert top.top_ids.dtype == np.int32
    assert np.array_equal(top.top_ids, np.argsort(-some, axis=1)[:, :5])
    assert np.array_equal(top.top_logits, np.sort(some, axis=1)[:, :-6:-1])
    assert top.logsumexp == pytest.approx(np.log(np.exp(some).sum(axis=1)), rel=1e-5)


def test_ties_go_to_the_lower_id(backend: ReferenceBackend) -> None:
    weights = random_weights(SPEC)
    values = np.zeros((SPEC.vocab_size, SPEC.hidden_size), dtype=np.float32)
    data = values.view(np.uint8).reshape(SPEC.vocab_size, -1)
    head = Weight("head", WeightType.F32, values.shape, data)
    model = backend.load(SPEC, replace(weights, head=head))
    kv = backend.alloc_kv(kv_layout(SPEC), 1)
    top = backend.step(model, kv, make_batch([([1, 2], 0, [0])], 16, num_top=4)).top_ids
    assert top is not None and top.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", KVDType)
def test_pages_move_between_pools(
    backend: ReferenceBackend, model: ReferenceModel, dtype: KVDType
) -> None:
    layout = kv_layout(SPEC, 16, dtype)
    here, there = backend.alloc_kv(layout, 4), backend.alloc_kv(layout, 4)
    backend.step(model, here, make_batch([(TOKENS[:40], 0, [1, 2, 3])], 16))
    for page, to in ((1, 2), (2, 0), (3, 1)):
        data = backend.export_page(here, page)
        assert len(data) == layout.page_bytes
        backend.import_page(there, to, data)
        assert backend.export_page(there, to) == data
    decode = make_batch([(TOKENS[40:], 40, [1, 2, 3])], 16)
    moved = make_batch([(TOKENS[40:], 40, [2, 0, 1])], 16)
    expected = full(backend, model, here, decode)
    assert np.array_equal(full(backend, model, there, moved), expected)
    exact = all_logits(backend, model, TOKENS)[40:]
    bound = {
        KVDType.F32: 1e-4,
        KVDType.F16: 2e-2,
        KVDType.BF16: 2e-1,
        KVDType.I8: 2e-1,
        KVDType.E4M3: 0.5,
        KVDType.E5M2: 1.0,
    }[dtype]
    assert np.abs(expected - exact).max() < bound
    assert dtype is KVDType.F32 or np.abs(expected - exact).max() > 1e-5


def test_exported_order(backend: ReferenceBackend) -> None:
    """[layer, K|V, kv_head, slot, head_dim]: V of layer 0 is the plain projection."""
    weights = random_weights(SPEC)
    model = backend.load(SPEC, weights)
    kv = backend.alloc_kv(kv_layout(SPEC), 1)
    backend.step(model, kv, make_batch([(TOKENS[:16], 0, [0])], 16))
    page = np.frombuffer(backend.export_page(kv, 0), np.float32).reshape(2, 2, 2, 16, 8)
    x = rms_norm(model.embedding[TOKENS[:16]], model.layers[0]["attn_norm"], SPEC.norm_eps)
    expected = (x @ model.layers[0]["v"].T).view(16, 2, 8).numpy()
    assert np.abs(page[0, 1] - expected.swapaxes(0, 1)).max() < 1e-5


def test_copied_pages(backend: ReferenceBackend, model: ReferenceModel) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC), 6)
    backend.step(model, kv, make_batch([(TOKENS, 0, [0, 1, 2])], 16))
    backend.copy_pages(kv, np.array([2, 0], np.int32), np.array([4, 5], np.int32))
    assert backend.export_page(kv, 4) == backend.export_page(kv, 2)
    assert backend.export_page(kv, 5) == backend.export_page(kv, 0)


def pages_of(kv: ReferenceKVPool, backend: ReferenceBackend) -> list[bytes]:
    return [backend.export_page(kv, page) for page in range(kv.num_pages)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", [50]),
        ("token_ids", [-1]),
        ("positions", [4]),
        ("page_table", [[4]]),
        ("page_table", [[-1]]),
        ("slot_mapping", [7]),
        ("logit_rows", [1]),
        ("seq_lens", [17]),
        ("cu_seqlens_q", [0, 2]),
    ],
)
def test_faults_are_refused_before_anything_is_written(
    backend: ReferenceBackend, model: ReferenceModel, name: str, value: list[Any]
) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC), 4)
    before = pages_of(kv, backend)
    fault: dict[str, Any] = {name: np.array(value, dtype=np.int32)}
    batch = replace(make_batch([([3], 0, [2])], 16), **fault)
    with pytest.raises(ContractError, match=name):
        backend.step(model, kv, batch)
    assert pages_of(kv, backend) == before


def test_faulty_page_arguments(backend: ReferenceBackend) -> None:
    kv = backend.alloc_kv(kv_layout(SPEC), 2)
    with pytest.raises(ContractError, match="outside the pool of 2"):
        backend.export_page(kv, 2)
    with pytest.raises(ContractError, match="bytes, not 3"):
        backend.import_page(kv, 0, b"abc")
    with pytest.raises(ContractError, match="outside the pool of 2"):
        backend.copy_pages(kv, np.array([0], np.int32), np.array([-1], np.int32))
    with pytest.raises(ContractError, match="share a page"):
        backend.copy_pages(kv, np.array([0], np.int32), np.array([0], np.int32))


def test_weights_that_do_not_fit(backend: ReferenceBackend) -> None:
    weights = random_weights(SPEC)
    with pytest.raises(ContractError, match=r"gate: shape \(40, 24\), the spec needs \(39, 24\)"):
        backend.load(replace(SPEC, intermediate_size=39), weights)
    with pytest.raises(ContractError, match="2 layers of weights, not 3"):
        backend.load(replace(SPEC, num_layers=3, sliding_window=None), weights)


def test_memory_that_is_not_there(backend: ReferenceBackend) -> None:
    with pytest.raises(MemoryError, match="pages"):
        backend.alloc_kv(kv_layout(SPEC), 2**40)


def test_a_tied_head_is_counted_once(model: ReferenceModel) -> None:
    per_layer = 24 + 32 * 24 + 2 * 16 * 24 + 24 * 32 + 24 + 3 * 24 * 40 + 32 + 24 + 8
    assert model.weight_bytes == 4 * (50 * 24 + 24 + 2 * per_layer)

"""Identity of loaded models, and refusals that name file, key or tensor."""

import contextlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.models import load_model
from engine.text.default_model import find_default_model
from engine.weights.checkpoint_file import CheckpointError
from tests.engine.models.test_from_gguf import write_gguf
from tests.engine.models.tiny import save, tiny_model

Changes = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("models") / "tiny-llama")


def changed(checkpoint: Path, tmp_path: Path, changes: Changes) -> Path:
    """A copy with keys of config.json replaced; None takes a key away."""
    folder = tmp_path / "changed"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_default_model() -> None:
    path = find_default_model()
    assert path is not None
    loaded = load_model(path)
    spec = loaded.spec
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("llama", 30, 576)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.max_context) == (49152, 8192)
    assert spec.rope_inv_freq[1] == pytest.approx(100000.0 ** (-2 / 64))
    assert loaded.weights.head is None
    assert not loaded.weights.embedding.data.flags.owndata


def test_default_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_default_model() is None


def test_digest_is_of_the_contents(checkpoint: Path, tmp_path: Path) -> None:
    same = shutil.copytree(checkpoint, tmp_path / "other-name")
    assert load_model(same).digest == load_model(checkpoint).digest
    assert load_model(same).name == "other-name"
    other = changed(checkpoint, tmp_path, {"rms_norm_eps": 1e-5})
    assert load_model(other).digest != load_model(checkpoint).digest
    weights = same / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load_model(same).digest != load_model(checkpoint).digest


def test_digest_of_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    one = write_gguf(tmp_path / "one.gguf", model)
    two = Path(shutil.copy(one, tmp_path / "two.gguf"))
    assert load_model(one).digest == load_model(two).digest
    other = write_gguf(tmp_path / "other.gguf", model, keys={"rope.freq_base_train": 1.0})
    assert load_model(other).digest != load_model(one).digest


CONFIG_FAULTS: list[tuple[Changes, str]] = [
    ({"architectures": ["GemmaForCausalLM"]}, "architectures: 'GemmaForCausalLM' is not supported"),
    ({"architectures": None}, "architectures: is missing"),
    ({"architectures": "LlamaForCausalLM"}, "architectures: .* is not a list of one name"),
    ({"hidden_size": None}, "hidden_size: is missing"),
    ({"hidden_size": "64"}, "hidden_size: '64' is not a whole number"),
    ({"hidden_size": True}, "hidden_size: True is not a whole number"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000 is not a whole number"),
    ({"num_hidden_layers": 4}, r"model.layers.3.input_layernorm.weight: tensor is missing"),
    ({"num_hidden_layers": 2}, r"model.layers.2.\S+: tensor has no place .* \(and 8 more\)"),
    ({"head_dim": 10**9}, "head_dim: 1000000000 is not a whole number"),
    ({"head_dim": 32}, r"q_proj.weight: shape is \(64, 64\), the model needs \(128, 64\)"),
    ({"num_key_value_heads": 3}, "num_attention_heads: heads do not divide"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps: -1.0 is not between"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not between"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ({"mlp_bias": True}, "mlp_bias: True is not supported"),
    ({"attention_bias": True}, "q_proj.bias: tensor is missing"),
    ({"attention_bias": 1}, "attention_bias: 1 is not true or false"),
    ({"tie_word_embeddings": False, "vocab_size": 100}, "embed_tokens.weight: shape is"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: .* is not supported"),
    ({"rope_parameters": 3}, "rope_parameters: 3 is not an object"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope' is not"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor: is missing"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.rope_theta: 1.0 is not between 1 "),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor: 0.5 is not supported",
    ),
    (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            }
        },
        "rope_parameters.high_freq_factor: 4.0 is not above",
    ),
    (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4, "layer_types": ["chunked"]},
        "layer_types: is not one of full_attention, sliding_attention for each of 3 layers",
    ),
    (
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
        "self_attn.q_norm.weight: tensor is missing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), CONFIG_FAULTS)
def test_config_faults_are_named(
    checkpoint: Path, tmp_path: Path, changes: Changes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(changed(checkpoint, tmp_path, changes))
    assert str(tmp_path) in str(caught.value)


def test_tied_checkpoints_may_repeat_the_embedding(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path, {"tie_word_embeddings": True})
    assert load_model(folder).weights.head is None


def test_tensor_faults_are_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"self_attn.extra.weight: tensor has no place in a "):
        load_model(folder)


def test_old_rotary_tables_are_no_fault(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.norm.weight"][:8].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = table
    save_file(tensors, folder / "model.safetensors")
    assert load_model(folder).spec == load_model(checkpoint).spec


def test_config_that_is_no_json(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path, {})
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: damaged: not valid JSON"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_model(folder)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 8, "llama.expert_count: 8 is not supported"),
        ("attention.sliding_window", 512, "llama.attention.sliding_window: 512 is not supported"),
        ("attention.value_length", 8, "llama.attention.value_length: 8 is not supported"),
        ("rope.dimension_count", 8, "llama.rope.dimension_count: 8 is not supported"),
        ("rope.scaling.type", "longrope", "llama.rope.scaling.type: 'longrope' is not none, "),
        ("rope.scaling.type", "linear", "llama.rope.scaling.factor: is missing"),
        ("attention.key_length", 10**9, "llama.attention.key_length: 1000000000 is not a whole"),
        ("vocab_size", 99, "token_embd.weight: shape is"),
    ],
)
def test_gguf_metadata_faults_are_named(
    tmp_path: Path, key: str, value: int | str, message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), keys={key: value})
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("blk.0.ffn_gate_inp.weight", np.ones((8, 64)), "blk.0.ffn_gate_inp.weight: tensor has no"),
        ("rope_freqs.weight", np.ones(9), "rope_freqs.weight: needs 8 float32 values"),
        ("rope_freqs.weight", np.zeros(8), "rope_freqs.weight: values are not positive"),
        ("blk.0.attn_q.bias", np.ones(64), "blk.1.attn_q.bias: tensor is missing"),
        ("blk.0.attn_q.bias", np.ones(60), r"blk.0.attn_q.bias: shape is \(60,\)"),
    ],
)
def test_gguf_tensor_faults_are_named(
    tmp_path: Path, name: str, values: np.ndarray[Any, Any], message: str
) -> None:
    extra = {name: values.astype(np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra=extra)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def bare(path: Path, build: Callable[[gguf.GGUFWriter], None], architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    build(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unsupported_gguf_architecture(tmp_path: Path) -> None:
    path = bare(tmp_path / "gemma.gguf", lambda w: w.add_block_count(1), "gemma2")
    with pytest.raises(
        CheckpointError, match="'gemma2' is not supported; supported are llama, qwe"
    ):
        load_model(path)


def test_quantised_vectors_are_refused(tmp_path: Path) -> None:
    """A block-quantised bias cannot be put back in half-rotation order."""

    def build(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(1)
        writer.add_context_length(8)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
        raw = gguf.quantize(np.ones(32, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
        for name in ("blk.0.attn_norm.weight", "blk.0.attn_q.bias"):
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    path = bare(tmp_path / "vector.gguf", build, "llama")
    with pytest.raises(CheckpointError, match=r"attn_norm\.weight: a vector stored as q8_0"):
        load_model(path)


DIRECTORY_BYTES = 3000


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    data = write_gguf(path, tiny_model("llama", attention_bias=True)).read_bytes()
    assert len(data) > 10 * DIRECTORY_BYTES
    return data


@settings(max_examples=300)
@given(
    position=st.integers(0, DIRECTORY_BYTES),
    patch=st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff\xff\xff\x7f")),
)
def test_damaged_directories_never_crash(
    tmp_path: Path, tiny_gguf: bytes, position: int, patch: bytes
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(tiny_gguf[:position] + patch + tiny_gguf[position + len(patch) :])
    with contextlib.suppress(CheckpointError):
        loaded = load_model(path)
        assert len(loaded.weights.layers) == loaded.spec.num_layers

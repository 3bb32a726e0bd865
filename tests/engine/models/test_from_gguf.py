"""Tiny models written as GGUF the way llama.cpp's converter does, read back by ours."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.models import load_model
from kernels.contract import Float32Array
from kernels.dequantise import dequantise
from kernels.reference import ReferenceBackend
from tests.engine.models.tiny import VOCAB, oracle_logits, tiny_model
from tests.kernels.stepping import all_logits

Keys = dict[str, str | int | float]
TOKENS = np.random.default_rng(6).integers(0, VOCAB, 60).tolist()
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(middle)]}.{kind}"


def interleave(values: Float32Array, heads: int) -> Float32Array:
    """Rows of a head from halves to pairs, as the converter does for llama models."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    keys: Keys | None = None,
    extra: dict[str, Float32Array] | None = None,
) -> Path:
    """`model` as GGUF with matrices of type `kind`; `keys` are added under the architecture."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (keys or {}).items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            is_q = ".q_proj" in name
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            values = interleave(values, heads)
        quantisation = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        raw = gguf.quantize(np.ascontiguousarray(values), quantisation)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=quantisation)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = tiny_model(family, **changes)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model))
    assert (loaded.name, loaded.spec.family) == ("tiny", family)
    check_logits(loaded, oracle_logits(model, TOKENS))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_rows_are_put_back_whatever_their_type(tmp_path: Path, kind: str) -> None:
    """A quantised row holds the same blocks wherever it stands."""
    model = tiny_model("llama")
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model, kind=kind))
    quantisation = gguf.GGMLQuantizationType[kind]
    for layer, weights in enumerate(loaded.weights.layers):
        attention = model.model.layers[layer].self_attn
        for ours, theirs in ((weights.q, attention.q_proj), (weights.k, attention.k_proj)):
            raw = gguf.quantize(theirs.weight.detach().numpy(), quantisation)
            assert np.array_equal(dequantise(ours), gguf.dequantize(raw, quantisation))


def test_linear_rope(tmp_path: Path) -> None:
    model = tiny_model(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    )
    keys: Keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model, keys=keys))
    check_logits(loaded, oracle_logits(model, TOKENS))


def test_yarn_rope(tmp_path: Path) -> None:
    model = tiny_model(
        "qwen2",
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
        },
    )
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model, keys=keys))
    check_logits(loaded, oracle_logits(model, TOKENS))


def test_llama3_rope_as_a_tensor_of_factors(tmp_path: Path) -> None:
    model = tiny_model(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
    )
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7.9
    path = write_gguf(tmp_path / "tiny.gguf", model, extra={"rope_freqs.weight": factors})
    check_logits(load_model(path), oracle_logits(model, TOKENS))


def check_logits(loaded: Any, expected: Float32Array) -> None:
    backend = ReferenceBackend(threads=1)
    got = all_logits(backend, backend.load(loaded.spec, loaded.weights), TOKENS, chunks=(25, 1))
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()

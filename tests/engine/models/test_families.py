"""Checkpoints of every family, saved by `transformers`: the reference gives its logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import load_model
from kernels.reference import ReferenceBackend
from tests.engine.models.tiny import VOCAB, load_oracle, oracle_logits, save, tiny_model
from tests.kernels.stepping import all_logits

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 75).tolist()
THETA = {"rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 32, "rms_norm_eps": 1e-2}),
    "llama all heads": ("llama", {"num_key_value_heads": 4, "rope_parameters": THETA}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3 | THETA}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0} | THETA}),
    "yarn rope": ("llama", {"rope_parameters": YARN | THETA}),
    "yarn tuned": (
        "qwen2",
        {"rope_parameters": YARN | THETA | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}},
    ),
    "yarn attention factor": ("qwen3", {"rope_parameters": YARN | THETA | {"attention_factor": 2}}),
    "yarn mscale": (
        "mistral",
        {"rope_parameters": YARN | THETA | {"mscale": 1.5, "mscale_all_dim": 0.7}},
    ),
    "mistral window": ("mistral", {"sliding_window": 20}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    loaded = load_model(save(model, tmp_path / "checkpoint"))
    assert loaded.spec.family == family
    backend = ReferenceBackend(threads=1)
    reference = backend.load(loaded.spec, loaded.weights)
    expected = oracle_logits(model, TOKENS)
    for chunks in ((), (30, 1, 16), (40, *[1] * 35)):
        close(all_logits(backend, reference, TOKENS, chunks=chunks), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save(tiny_model("qwen3").to(dtype=dtype), tmp_path / "checkpoint")
    loaded = load_model(folder)
    assert loaded.weights.embedding.type.name == {torch.float16: "F16"}.get(dtype, "BF16")
    model = load_oracle("qwen3", folder)
    backend = ReferenceBackend(threads=1)
    reference = backend.load(loaded.spec, loaded.weights)
    close(all_logits(backend, reference, TOKENS), oracle_logits(model, TOKENS))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("mistral")
    whole = load_model(save(model, tmp_path / "whole"))
    split = load_model(save(model, tmp_path / "split", max_shard_size="100KB"))
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    assert split.spec == whole.spec
    assert np.array_equal(split.weights.layers[2].down.data, whole.weights.layers[2].down.data)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (THETA, {"rope_theta": 5000.0}),
        (
            LLAMA3 | THETA,
            {"rope_theta": 5000.0, "rope_scaling": LLAMA3},
        ),
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_configs_of_earlier_versions(
    tmp_path: Path, new: dict[str, Any], old: dict[str, Any]
) -> None:
    """`rope_theta` beside `rope_scaling`, where `rope_parameters` is now."""
    folder = save(tiny_model("llama", rope_parameters=new), tmp_path / "checkpoint")
    expected = load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | old))
    assert load_model(folder).spec == expected.spec


def close(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Within 1e-4 of the largest logit."""
    assert np.abs(expected).max() > 1
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()

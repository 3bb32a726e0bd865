"""Tiny random checkpoints of every family, made by `transformers`."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.contract import Float32Array

VOCAB = 101
FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str, **changes: object) -> Any:
    """A model with random weights, norms and biases, large enough that every part matters."""
    config_type, model_type = FAMILIES[family]
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = model_type(config_type(**(values | changes))).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * spread if "norm" in name else 0.2 * spread)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The model's checkpoint, in a folder."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, **options)
    return folder


def load_oracle(family: str, folder: Path) -> Any:
    """A saved checkpoint in `transformers`, in float32."""
    with contextlib.redirect_stderr(io.StringIO()):
        return FAMILIES[family][1].from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: Sequence[int]) -> Float32Array:
    """float32 [T, vocab] of the model in `transformers`."""
    logits: Float32Array = model(torch.tensor([list(token_ids)])).logits[0].float().numpy()
    return logits

"""Llama, Qwen2 and Qwen3 models from GGUF metadata and tensors.

Key and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Mistral files
carry the architecture "llama" and no sliding window.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from engine.models import rope
from engine.models.assembly import (
    LAYER_FIELDS,
    MAX_HEAD_DIM,
    QK_NORM,
    QKV_BIAS,
    TensorNames,
    assemble,
)
from engine.models.settings import Settings
from engine.weights.checkpoint_file import CheckpointError
from engine.weights.gguf import GGUFFile
from kernels.contract import DecoderSpec, DecoderWeights, Weight, WeightType

_ROPE_FACTORS: Final = "rope_freqs.weight"
_NAMES: Final = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer=MappingProxyType(
        {
            "attn_norm": "blk.{i}.attn_norm.weight",
            "q": "blk.{i}.attn_q.weight",
            "k": "blk.{i}.attn_k.weight",
            "v": "blk.{i}.attn_v.weight",
            "o": "blk.{i}.attn_output.weight",
            "mlp_norm": "blk.{i}.ffn_norm.weight",
            "gate": "blk.{i}.ffn_gate.weight",
            "up": "blk.{i}.ffn_up.weight",
            "down": "blk.{i}.ffn_down.weight",
            "q_bias": "blk.{i}.attn_q.bias",
            "k_bias": "blk.{i}.attn_k.bias",
            "v_bias": "blk.{i}.attn_v.bias",
            "o_bias": "blk.{i}.attn_output.bias",
            "q_norm": "blk.{i}.attn_q_norm.weight",
            "k_norm": "blk.{i}.attn_k_norm.weight",
        }
    ),
    ignored=lambda name: name == _ROPE_FACTORS,
)
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"llama": LAYER_FIELDS, "qwen2": LAYER_FIELDS + QKV_BIAS, "qwen3": LAYER_FIELDS + QK_NORM}
)
_OPTIONAL: Final = (*QKV_BIAS, "o_bias")
_PERMUTED: Final = "llama"
"""The architecture whose q and k rows GGUF stores interleaved."""


def model_from_gguf(file: GGUFFile) -> tuple[DecoderSpec, DecoderWeights]:
    """Raises CheckpointError naming the key or tensor that is wrong or not supported."""
    spec = spec_from_gguf(file)
    architecture = spec.family
    tensors: Mapping[str, Weight] = file.tensors
    if architecture == _PERMUTED:
        tensors = {name: _half_rotation(spec, weight) for name, weight in tensors.items()}
    present = [f for f in _OPTIONAL if _NAMES.layer[f].format(i=0) in tensors]
    fields = dict.fromkeys((*_FIELDS[architecture], *present))
    tied = _NAMES.head not in tensors
    return spec, assemble(file.path, spec, tensors, _NAMES, fields, tied=tied)


def spec_from_gguf(file: GGUFFile) -> DecoderSpec:
    """The spec alone, of a file whose data may not be there. Raises as `model_from_gguf`."""
    architecture = Settings(file.path, file.metadata).text("general.architecture")
    if architecture not in _FIELDS:
        raise CheckpointError(
            file.path,
            f"architecture {architecture!r} is not supported; supported are {', '.join(_FIELDS)}",
            item="general.architecture",
        )
    settings = Settings(file.path, file.metadata, architecture + ".")
    return _spec(file, settings, architecture)


def _spec(file: GGUFFile, settings: Settings, architecture: str) -> DecoderSpec:
    for key in ("expert_count", "attention.sliding_window"):
        settings.refuse(key, (0,), f"{architecture} models here are dense, with full attention")
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        settings.refuse(key, (0.0, 1.0), "plain scales only")
    hidden, num_heads = settings.size("embedding_length"), settings.size("attention.head_count")
    head_dim = settings.size("attention.key_length", max(hidden // num_heads, 1), most=MAX_HEAD_DIM)
    settings.refuse("attention.value_length", (head_dim,), "keys and values of one size only")
    settings.refuse("rope.dimension_count", (head_dim,), "rotation of whole heads only")
    embedding = file.tensors.get(_NAMES.embedding)
    rotation = _rope(file, settings, head_dim)
    num_kv_heads = settings.size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise settings.error("attention.head_count", "heads do not divide into groups and halves")
    return DecoderSpec(
        family=architecture,
        num_layers=settings.size("block_count", most=len(file.tensors)),
        hidden_size=hidden,
        intermediate_size=settings.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=settings.size("vocab_size", embedding.shape[0] if embedding else None),
        max_context=settings.size("context_length"),
        norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        rope_inv_freq=rotation.inv_freq,
        rope_scale=rotation.scale,
    )


def _rope(file: GGUFFile, settings: Settings, dim: int) -> rope.Rope:
    theta = settings.number("rope.freq_base", 10000.0, above=1.0)
    scaling = settings.text("rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        factors = file.tensors[_ROPE_FACTORS]
        if scaling != "none" or factors.type is not WeightType.F32 or factors.shape != (dim // 2,):
            reason = f"needs {dim // 2} float32 values and rope.scaling.type none"
            raise CheckpointError(file.path, reason, item=_ROPE_FACTORS)
        values = factors.data.view(np.float32)[0]
        if not np.all(np.isfinite(values) & (values > 0)):
            raise CheckpointError(file.path, "values are not positive", item=_ROPE_FACTORS)
        return rope.divided(theta, dim, values)
    if scaling == "none":
        return rope.plain(theta, dim)
    if scaling not in ("linear", "yarn"):
        raise settings.error("rope.scaling.type", f"{scaling!r} is not none, linear or yarn")
    factor = settings.number("rope.scaling.factor")
    if scaling == "linear":
        return rope.linear(theta, dim, factor)
    # llama.cpp multiplies the paper's scale by attn_factor; `transformers` replaces it.
    attn_factor = settings.number("rope.scaling.attn_factor", 1.0)
    return rope.yarn(
        theta,
        dim,
        factor=factor,
        original_context=settings.size("rope.scaling.original_context_length"),
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
        scale=attn_factor * rope.yarn_scale(factor),
    )


def _half_rotation(spec: DecoderSpec, weight: Weight) -> Weight:
    """Undo GGUF's interleaving of q and k rows, (2i, 2i+1) back to (i, i + head_dim/2).

    Works on raw rows, whatever their type; a bias vector is a column of elements.
    """
    _, _, part = weight.name.rpartition(".attn_")
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(part.partition(".")[0])
    quantised_vector = len(weight.shape) == 1 and weight.type.block_size > 1
    if heads is None or weight.shape[0] != heads * spec.head_dim or quantised_vector:
        return weight
    rows = weight.data.reshape(weight.shape[0], -1)
    pairs = rows.reshape(heads, spec.head_dim // 2, 2, -1)
    halves = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.data.shape)
    return Weight(weight.name, weight.type, weight.shape, halves)

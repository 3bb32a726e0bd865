"""Llama, Mistral, Qwen2 and Qwen3 models from a Hugging Face folder.

config.json is read as `transformers` 5 writes it (`rope_parameters`) and as earlier versions did
(`rope_theta`, `rope_scaling`).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

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
from engine.weights.safetensors import SafetensorsFolder
from kernels.contract import DecoderSpec, DecoderWeights

_FAMILIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
    }
)
MAX_TENSORS: Final = 100_000
_HEAD: Final = "lm_head.weight"
_ROPE_TYPES: Final = "default, linear, llama3 and yarn"


def model_from_hf(
    folder: SafetensorsFolder, config: Mapping[str, object]
) -> tuple[DecoderSpec, DecoderWeights]:
    """Raises CheckpointError naming the key or tensor that is wrong or not supported."""
    path = folder.path / "config.json"
    spec, fields, tied = spec_from_hf(path, config, num_tensors=len(folder.tensors))
    weights = assemble(folder.path, spec, folder.tensors, _names(tied), fields, tied=tied)
    return spec, weights


def spec_from_hf(
    path: Path, config: Mapping[str, object], *, num_tensors: int = MAX_TENSORS
) -> tuple[DecoderSpec, tuple[str, ...], bool]:
    """The spec of the config.json at `path`, the fields of its layers, and whether the head is
    the embedding. Raises as `model_from_hf`."""
    settings = Settings(path, config)
    family = _family(settings)
    settings.refuse("hidden_act", ("silu",), "the MLP is gated by silu")
    settings.refuse("mlp_bias", (False,), "the MLP has no biases")
    settings.refuse("quantization_config", (), "weights must be F32, F16 or BF16")
    spec = _spec(settings, family, num_tensors=num_tensors)
    tied = settings.flag("tie_word_embeddings", False)
    fields = LAYER_FIELDS
    if family == "qwen2":
        fields += QKV_BIAS
    elif family in ("llama", "qwen3") and settings.flag("attention_bias", False):
        fields += (*QKV_BIAS, "o_bias")
    if family == "qwen3":
        fields += QK_NORM
    return spec, fields, tied


def _family(settings: Settings) -> str:
    architectures = settings.value("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise settings.error("architectures", f"{architectures!r} is not a list of one name")
    name = architectures[0]
    if not isinstance(name, str) or name not in _FAMILIES:
        raise settings.error(
            "architectures", f"{name!r} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]


def _spec(settings: Settings, family: str, *, num_tensors: int) -> DecoderSpec:
    hidden, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    default = 128 if family == "qwen3" else max(hidden // num_heads, 1)
    head_dim = settings.size("head_dim", default, most=MAX_HEAD_DIM)
    num_kv_heads = settings.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise settings.error("num_attention_heads", "heads do not divide into groups and halves")
    num_layers = settings.size("num_hidden_layers", most=num_tensors)
    rotation = _rope(settings, head_dim)
    return DecoderSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=settings.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=settings.size("vocab_size"),
        max_context=settings.size("max_position_embeddings"),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope_inv_freq=rotation.inv_freq,
        rope_scale=rotation.scale,
        sliding_window=_sliding_window(settings, family, num_layers),
    )


def _sliding_window(settings: Settings, family: str, num_layers: int) -> tuple[int, ...] | None:
    """Windows per layer. Llama has none; Qwen's are off unless `use_sliding_window`."""
    if family == "llama" or not settings.has("sliding_window"):
        return None
    if family != "mistral" and not settings.flag("use_sliding_window", False):
        return None
    window = settings.size("sliding_window")
    if settings.has("layer_types"):
        types = settings.value("layer_types")
        kinds = {"full_attention": 0, "sliding_attention": window}
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or not all(isinstance(kind, str) and kind in kinds for kind in types)
        ):
            reason = f"is not one of {', '.join(kinds)} for each of {num_layers} layers"
            raise settings.error("layer_types", reason)
        return tuple(kinds[kind] for kind in types)
    first = 0 if family == "mistral" else settings.size("max_window_layers", 28)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _rope(settings: Settings, dim: int) -> rope.Rope:
    # `transformers` 5 has one object; before, the base stood beside an object for scaling alone.
    key = "rope_parameters" if settings.has("rope_parameters") else "rope_scaling"
    values = settings.nested(key)
    theta_from = values if values.has("rope_theta") else settings
    theta = theta_from.number("rope_theta", 10000.0, above=1.0)
    for holder in (values, settings):
        holder.refuse("partial_rotary_factor", (1.0,), "rotation of whole heads only")
    kind = values.text("rope_type", values.text("type", "default"))
    if kind == "default":
        return rope.plain(theta, dim)
    if kind == "linear":
        return rope.linear(theta, dim, values.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise values.error("rope_type", f"{kind!r} is not supported; supported are {_ROPE_TYPES}")
    original = values.size(
        "original_max_position_embeddings", settings.size("max_position_embeddings")
    )
    if kind == "yarn":
        return _yarn(values, theta, dim, original)
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if low >= high:
        raise values.error("high_freq_factor", f"{high!r} is not above low_freq_factor {low!r}")
    return rope.llama3(
        theta,
        dim,
        factor=values.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=original,
    )


def _yarn(values: Settings, theta: float, dim: int, original: int) -> rope.Rope:
    factor = values.number("factor")
    scale = rope.yarn_scale(factor)
    if values.has("attention_factor"):
        scale = values.number("attention_factor")
    elif values.has("mscale") and values.has("mscale_all_dim"):
        all_dim = values.number("mscale_all_dim")
        scale = rope.yarn_scale(factor, values.number("mscale")) / rope.yarn_scale(factor, all_dim)
    return rope.yarn(
        theta,
        dim,
        factor=factor,
        original_context=original,
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        truncate=values.flag("truncate", True),
        scale=scale,
    )


def _names(tied: bool) -> TensorNames:
    attention, mlp = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
    layer = {
        "attn_norm": "model.layers.{i}.input_layernorm.weight",
        "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
        **{x: f"{attention}{x}_proj.weight" for x in ("q", "k", "v", "o")},
        **{f"{x}_bias": f"{attention}{x}_proj.bias" for x in ("q", "k", "v", "o")},
        **{f"{x}_norm": f"{attention}{x}_norm.weight" for x in ("q", "k")},
        **{x: f"{mlp}{x}_proj.weight" for x in ("gate", "up", "down")},
    }

    def ignored(name: str) -> bool:
        # Early Llama files store the rotary table; tied ones may repeat the embedding.
        return name.endswith(".rotary_emb.inv_freq") or (tied and name == _HEAD)

    return TensorNames(
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head=_HEAD,
        layer=layer,
        ignored=ignored,
    )

"""The shape that a spec gives each weight."""

from collections.abc import Mapping
from dataclasses import fields

from kernels.contract import ContractError, DecoderSpec, DecoderWeights, LayerWeights, Weight


def layer_shapes(spec: DecoderSpec) -> Mapping[str, tuple[int, ...]]:
    """Shapes of one layer's weights by field of `LayerWeights`."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "attn_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "mlp_norm": (hidden,),
        "gate": (mlp, hidden),
        "up": (mlp, hidden),
        "down": (hidden, mlp),
        "q_bias": (q,),
        "k_bias": (kv,),
        "v_bias": (kv,),
        "o_bias": (hidden,),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
    }


def layer_weights(layer: LayerWeights) -> dict[str, Weight]:
    """The weights a layer has, by field."""
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {name: weight for name, weight in values.items() if weight is not None}


def check_weights(spec: DecoderSpec, weights: DecoderWeights) -> None:
    """Raise ContractError naming the first weight whose shape is not the one `spec` gives it."""
    if len(weights.layers) != spec.num_layers:
        raise ContractError(f"{len(weights.layers)} layers of weights, not {spec.num_layers}")
    matrix = (spec.vocab_size, spec.hidden_size)
    expected = [(weights.embedding, matrix), (weights.final_norm, (spec.hidden_size,))]
    if weights.head is not None:
        expected.append((weights.head, matrix))
    shapes = layer_shapes(spec)
    for layer in weights.layers:
        expected += [(weight, shapes[name]) for name, weight in layer_weights(layer).items()]
    for weight, shape in expected:
        if weight.shape != shape:
            raise ContractError(f"{weight.name}: shape {weight.shape}, the spec needs {shape}")

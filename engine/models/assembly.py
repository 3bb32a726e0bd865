"""Tensors by name, checked against a spec, put in their places in `DecoderWeights`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.weights.checkpoint_file import CheckpointError
from kernels.contract import DecoderSpec, DecoderWeights, LayerWeights, Weight
from kernels.weight_shapes import layer_shapes

LAYER_FIELDS: Final[tuple[str, ...]] = (
    "attn_norm",
    "q",
    "k",
    "v",
    "o",
    "mlp_norm",
    "gate",
    "up",
    "down",
)
QKV_BIAS: Final[tuple[str, ...]] = ("q_bias", "k_bias", "v_bias")
QK_NORM: Final[tuple[str, ...]] = ("q_norm", "k_norm")
MAX_HEAD_DIM: Final = 1024


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a format names tensors; names in `layer` have `{i}` where the layer's number goes."""

    embedding: str
    final_norm: str
    head: str
    layer: Mapping[str, str]
    ignored: Callable[[str], bool]
    """Tensors that belong to no weight and are no fault."""


def assemble(
    path: Path,
    spec: DecoderSpec,
    tensors: Mapping[str, Weight],
    names: TensorNames,
    layer_fields: Iterable[str],
    *,
    tied: bool,
) -> DecoderWeights:
    """The weights of `spec`; each layer has exactly `layer_fields`.

    Raises CheckpointError naming the first tensor that is missing, has another shape than the
    spec says, or belongs to no place.
    """
    used: set[str] = set()

    def take(name: str, shape: tuple[int, ...]) -> Weight:
        used.add(name)
        if name not in tensors:
            raise CheckpointError(path, "tensor is missing", item=name)
        if tensors[name].shape != shape:
            raise CheckpointError(
                path, f"shape is {tensors[name].shape}, the model needs {shape}", item=name
            )
        if len(shape) == 1 and tensors[name].type.block_size > 1:
            raise CheckpointError(path, f"a vector stored as {tensors[name].type}", item=name)
        return tensors[name]

    matrix = (spec.vocab_size, spec.hidden_size)
    shapes = layer_shapes(spec)
    fields = tuple(layer_fields)
    weights = DecoderWeights(
        embedding=take(names.embedding, matrix),
        layers=tuple(
            LayerWeights(**{f: take(names.layer[f].format(i=i), shapes[f]) for f in fields})
            for i in range(spec.num_layers)
        ),
        final_norm=take(names.final_norm, (spec.hidden_size,)),
        head=None if tied else take(names.head, matrix),
    )
    extra = sorted(name for name in tensors if name not in used and not names.ignored(name))
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise CheckpointError(
            path, f"tensor has no place in a {spec.family} model{more}", item=extra[0]
        )
    return weights

"""Random weights of any spec and storage, for measurements and tests that need no checkpoint."""

from collections.abc import Callable, Collection

import numpy as np

from kernels.contract import DecoderSpec, DecoderWeights, LayerWeights, Weight, WeightType
from kernels.weight_shapes import layer_shapes

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm")
OPTIONAL = ("q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm")

_QUANT_DEVIATION = {
    **{WeightType.Q8_0: 73.9, WeightType.Q4_0: 4.6, WeightType.Q4_1: 4.6},
    **{WeightType.Q5_0: 9.2, WeightType.Q5_1: 9.2},
    **{WeightType.Q4_K: 4.6 * 36, WeightType.Q5_K: 9.2 * 36, WeightType.Q6_K: 18.5 * 74},
}
_MIDDLE = {WeightType.Q4_1: 7.5, WeightType.Q5_1: 15.5, WeightType.Q4_K: 7.5, WeightType.Q5_K: 15.5}


def random_weights(
    spec: DecoderSpec,
    rng: np.random.Generator,
    matrix_type: Callable[[str], WeightType],
    optional: Collection[str] = (),
    tied: bool = True,
) -> DecoderWeights:
    """Weights with the layer fields named in `optional` on top of those every layer has.

    `matrix_type` gives the storage of a layer's matrix by its field, and of "embedding" and "head".
    Elements have a deviation of cols ** -0.5; norms lie around 1 and vectors are float32.
    """
    shapes = layer_shapes(spec)

    def vector(name: str, size: int) -> Weight:
        values = rng.normal(1.0 if "norm" in name else 0.0, 0.2, size).astype(np.float32)
        return Weight(name, WeightType.F32, (size,), values.view(np.uint8)[None])

    def matrix(name: str, shape: tuple[int, ...]) -> Weight:
        return random_matrix(rng, name, matrix_type(name), (shape[0], shape[1]))

    def layer() -> LayerWeights:
        weights = {name: matrix(name, shapes[name]) for name in MATRICES}
        weights |= {name: vector(name, shapes[name][0]) for name in (*NORMS, *optional)}
        return LayerWeights(**weights)

    size = (spec.vocab_size, spec.hidden_size)
    return DecoderWeights(
        embedding=matrix("embedding", size),
        layers=tuple(layer() for _ in range(spec.num_layers)),
        final_norm=vector("final_norm", spec.hidden_size),
        head=None if tied else matrix("head", size),
    )


def random_matrix(
    rng: np.random.Generator, name: str, type_: WeightType, shape: tuple[int, int]
) -> Weight:
    """A matrix of elements around 0 with a deviation of cols ** -0.5."""
    rows, cols = shape
    deviation = cols**-0.5
    if type_ not in _QUANT_DEVIATION:
        values = rng.normal(0.0, deviation, shape).astype(np.float32)
        return Weight(name, type_, shape, _stored(values, type_))
    num_blocks = cols // type_.block_size
    blocks = rng.integers(0, 256, (rows, num_blocks, type_.block_bytes), dtype=np.uint8)
    scale = deviation / _QUANT_DEVIATION[type_] * rng.uniform(0.5, 1.5, (rows, num_blocks, 1))
    if type_ is WeightType.Q6_K:
        blocks[..., -2:] = scale.astype(np.float16).view(np.uint8)
    else:
        blocks[..., :2] = scale.astype(np.float16).view(np.uint8)
    if type_ in _MIDDLE:  # the K formats' minimum is subtracted
        sign = 1 if type_.block_size == 256 else -1
        middle = (sign * _MIDDLE[type_] * scale).astype(np.float16)
        blocks[..., 2:4] = middle.view(np.uint8)
    return Weight(name, type_, shape, blocks.reshape(rows, -1))


def _stored(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], type_: WeightType
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    if type_ is WeightType.F16:
        return values.astype(np.float16).view(np.uint8)
    if type_ is WeightType.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)

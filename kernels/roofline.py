"""Bytes and floating-point operations of a decoder's step, op by op.

What is counted, and what is not:
  * `flops`: two for every multiply-add of matrix products and of attention (scores and their sum
    over the values). Norms, RoPE, the gate and softmax do a few per element and count as none.
  * `memory_bytes`: what a step cannot avoid to move, whatever the backend: each weight once,
    however many tokens, the embedding rows of its tokens, K and V of every visible key once per
    sequence, and the new K and V.
  * `activation_bytes`: inputs and outputs of the op as if it ran alone. In a whole step most of
    them stay in caches, so a step's roof leaves them out.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kernels.contract import DecoderSpec, DecoderWeights, KVLayout, LayerWeights, WeightType
from kernels.weight_shapes import layer_shapes, layer_weights

OPS: Final = (
    "embed",
    "norm",
    "qkv",
    "rope",
    "kv_write",
    "attention",
    "o",
    "gate_up",
    "down",
    "head",
)
"""Every op that `op_costs` tells of: the layers' ops are of all layers together."""

_OP_OF_WEIGHT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("attn_norm", "mlp_norm"), "norm"),
    **dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias"), "qkv"),
    **dict.fromkeys(("q_norm", "k_norm"), "rope"),
    **dict.fromkeys(("o", "o_bias"), "o"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
    "down": "down",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op does (see the module)."""

    flops: int = 0
    memory_bytes: int = 0
    activation_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.memory_bytes + other.memory_bytes,
            self.activation_bytes + other.activation_bytes,
        )

    @property
    def intensity(self) -> float:
        """Operations per byte of memory traffic; infinite without any."""
        return self.flops / self.memory_bytes if self.memory_bytes else float("inf")


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A step: (new tokens, keys visible to the last of them) of each sequence, and how many rows
    of logits are wanted."""

    sequences: tuple[tuple[int, int], ...]
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.sequences)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a decoder's weights by the op that reads them, all layers together. A step reads
    one embedding row per token; `embedding_row` is its size."""

    by_op: Mapping[str, int]
    embedding_row: int
    embedding: int

    @property
    def total(self) -> int:
        """Of the whole checkpoint: a tied embedding, which is the head too, counts once."""
        return sum(self.by_op.values()) + self.embedding

    @staticmethod
    def of(weights: DecoderWeights) -> "WeightBytes":
        """Of weights as they are stored."""
        by_op = {"norm": weights.final_norm.data.nbytes}
        for layer in weights.layers:
            for name, weight in layer_weights(layer).items():
                _add(by_op, _OP_OF_WEIGHT[name], weight.data.nbytes)
        head = weights.head or weights.embedding
        by_op["head"] = head.data.nbytes
        embedding = weights.embedding.data
        own = 0 if weights.head is None else embedding.nbytes
        return WeightBytes(by_op, embedding.shape[1], own)

    @staticmethod
    def stored_as(
        spec: DecoderSpec,
        type_of: Callable[[str], WeightType],
        *,
        optional: Collection[str] = (),
        tied: bool = False,
    ) -> "WeightBytes":
        """Of a spec whose matrices are stored as `type_of` says (fields of `LayerWeights`,
        "embedding" and "head"), vectors in float32, with the `optional` fields on top."""

        def size(name: str, shape: tuple[int, ...]) -> int:
            kind = type_of(name) if len(shape) == 2 else WeightType.F32
            rows, cols = (1, *shape)[-2:]
            return rows * -(-cols // kind.block_size) * kind.block_bytes

        by_op = {"norm": size("final_norm", (spec.hidden_size,))}
        required = set(LayerWeights.__dataclass_fields__) - _OPTIONAL
        for name, shape in layer_shapes(spec).items():
            if name in required or name in optional:
                _add(by_op, _OP_OF_WEIGHT[name], size(name, shape) * spec.num_layers)
        matrix = (spec.vocab_size, spec.hidden_size)
        embedding = size("embedding", matrix)
        by_op["head"] = embedding if tied else size("head", matrix)
        return WeightBytes(
            by_op, size("embedding", (1, spec.hidden_size)), 0 if tied else embedding
        )


_OPTIONAL: Final = frozenset({"q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"})


def op_costs(
    spec: DecoderSpec,
    shape: BatchShape,
    weights: WeightBytes,
    kv: KVLayout,
    *,
    activation_itemsize: int = 4,
) -> dict[str, Cost]:
    """The cost of each of `OPS` in one step of this shape, all layers together."""
    tokens, rows, layers = shape.num_tokens, shape.num_rows, spec.num_layers
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    read, item = weights.by_op, activation_itemsize
    pairs = keys = 0
    for window, count in _windows(spec).items():
        for new, context in shape.sequences:
            pairs += count * visible_pairs(new, context, window)
            keys += count * visible_keys(new, context, window)
    key_bytes = kv_token_bytes(kv) // layers

    def product(op: str, num: int, inputs: int, outputs: int, times: int = layers) -> Cost:
        flops = 2 * num * inputs * outputs * times
        moved = num * (inputs + outputs) * times * item
        return Cost(flops, read.get(op, 0), moved)

    def moved(op: str, elements: int) -> Cost:
        return Cost(0, read.get(op, 0), elements * item)

    return {
        "embed": Cost(0, tokens * weights.embedding_row, tokens * hidden * item),
        "norm": moved("norm", tokens * hidden * 2 * (2 * layers + 1)),
        "qkv": product("qkv", tokens, hidden, q + 2 * k),
        "rope": moved("rope", tokens * (q + k) * 2 * layers),
        "kv_write": Cost(0, tokens * key_bytes * layers, tokens * 2 * k * layers * item),
        "attention": Cost(4 * pairs * q, keys * key_bytes, tokens * 2 * q * layers * item),
        "o": product("o", tokens, q, hidden),
        "gate_up": product("gate_up", tokens, hidden, 2 * mlp),
        "down": product("down", tokens, mlp, hidden),
        "head": product("head", rows, hidden, spec.vocab_size, 1) if rows else Cost(),
    }


class StepCosts:
    """Flops and memory bytes of whole steps, from a few products: the sums of `op_costs`."""

    def __init__(self, spec: DecoderSpec, weights: WeightBytes, kv: KVLayout) -> None:
        one = op_costs(spec, BatchShape(((1, 1),), 1), weights, kv)
        matrices = ("qkv", "o", "gate_up", "down")
        self._token_flops = sum(one[op].flops for op in matrices)
        self._row_flops = one["head"].flops
        self._pair_flops = 4 * spec.num_heads * spec.head_dim
        self._head_bytes = weights.by_op["head"]
        self._fixed_bytes = sum(weights.by_op.values()) - self._head_bytes
        self._token_bytes = weights.embedding_row + kv_token_bytes(kv)
        self._key_bytes = kv_token_bytes(kv) // spec.num_layers
        self._windows = tuple(_windows(spec).items())

    def cost(self, sequences: Sequence[tuple[int, int]], num_rows: int) -> tuple[int, int]:
        """(flops, memory bytes) of a step; the arguments are `BatchShape`'s."""
        tokens = pairs = keys = 0
        for new, context in sequences:
            tokens += new
            for window, count in self._windows:
                if window:
                    pairs += count * visible_pairs(new, context, window)
                    keys += count * visible_keys(new, context, window)
                else:
                    pairs += count * (new * context - new * (new - 1) // 2)
                    keys += count * context
        flops = self._token_flops * tokens + self._row_flops * num_rows + self._pair_flops * pairs
        memory = self._fixed_bytes + self._token_bytes * tokens + self._key_bytes * keys
        return flops, memory + (self._head_bytes if num_rows else 0)


def kv_token_bytes(kv: KVLayout) -> int:
    """Bytes of one token's K and V in all layers, scales included."""
    return kv.page_bytes // kv.page_size


def visible_pairs(new: int, context: int, window: int) -> int:
    """(query, key) pairs of the `new` last positions of `context`, where each query sees itself
    and the keys before it, `window` of them at most; 0 is all."""
    whole = new * context - new * (new - 1) // 2
    if not window or context <= window:
        return whole
    # Queries at the last positions see `window` keys, those before them what there is.
    full = min(new, context - window)
    early = new - full
    start = context - new
    return full * window + early * start + early * (early + 1) // 2


def visible_keys(new: int, context: int, window: int) -> int:
    """Keys that at least one of the `new` last positions of `context` sees."""
    return context if not window else min(context, window + new - 1)


def _windows(spec: DecoderSpec) -> dict[int, int]:
    """How many layers have each window."""
    counts: dict[int, int] = {}
    for window in spec.sliding_window or (0,) * spec.num_layers:
        counts[window] = counts.get(window, 0) + 1
    return counts


def _add(sums: dict[str, int], name: str, number: int) -> None:
    sums[name] = sums.get(name, 0) + number

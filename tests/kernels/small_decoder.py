"""A decoder small enough for tests that every block format fits."""

from collections.abc import Callable

from kernels.contract import DecoderSpec, WeightType

WeightTypes = Callable[[str], WeightType]

SPEC = DecoderSpec(
    family="llama",
    num_layers=2,
    hidden_size=96,
    intermediate_size=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=133,
    max_context=1024,
    norm_eps=1e-5,
    rope_inv_freq=tuple(10000.0 ** (-i / 8) for i in range(8)),
)


def all_of(type_: WeightType) -> WeightTypes:
    """The same storage for every matrix."""
    return lambda name: type_

"""`read_header`: a model's spec and the sizes of its weights, without its weights."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.models.from_gguf import spec_from_gguf
from engine.models.from_hf import spec_from_hf
from engine.weights.checkpoint_file import CheckpointError, parse_json_object, read_file
from engine.weights.gguf import open_gguf
from kernels.contract import DecoderSpec, Weight, WeightType
from kernels.roofline import WeightBytes

_DTYPES = {
    "float32": WeightType.F32,
    "float16": WeightType.F16,
    "bfloat16": WeightType.BF16,
}


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """What a checkpoint says of itself; `storage` names the types of its matrices."""

    spec: DecoderSpec
    weights: WeightBytes
    storage: str


def read_header(path: Path) -> ModelHeader:
    """Of a GGUF file (which may end after its header), a Hugging Face folder or its config.json.

    Raises CheckpointError naming file, key or tensor.
    """
    if path.is_dir():
        return _from_config(path / "config.json")
    if not path.exists():
        raise CheckpointError(path, "no such file or folder")
    return _from_config(path) if path.suffix == ".json" else _from_gguf(path)


def _from_config(path: Path) -> ModelHeader:
    config = parse_json_object(path, read_file(path))
    spec, fields, tied = spec_from_hf(path, config)
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(path, f"{name!r} is not one of {', '.join(_DTYPES)}", item="dtype")
    kind = _DTYPES[name]
    weights = WeightBytes.stored_as(spec, lambda _: kind, optional=fields, tied=tied)
    return ModelHeader(spec, weights, kind.value)


def _from_gguf(path: Path) -> ModelHeader:
    file = open_gguf(path, header_only=True)
    spec = spec_from_gguf(file)
    tensors = file.tensors
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in tensors:
            raise CheckpointError(path, "is missing", item=name)
    embedding = tensors["token_embd.weight"]
    head = tensors.get("output.weight")
    layers = [w for name, w in tensors.items() if name.startswith("blk.")]
    by_op = {
        "layers": sum(weight.data.nbytes for weight in layers),
        "norm": tensors["output_norm.weight"].data.nbytes,
        "head": (head or embedding).data.nbytes,
    }
    own = embedding.data.nbytes if head is not None else 0
    weights = WeightBytes(by_op, embedding.data.shape[1], own)
    return ModelHeader(spec, weights, _storage([embedding, *layers]))


def _storage(weights: list[Weight]) -> str:
    counts = Counter(weight.type.value for weight in weights if len(weight.shape) == 2)
    return ", ".join(name for name, _ in counts.most_common())

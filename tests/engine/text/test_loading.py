"""The default model's tokenizer against ids made with llama.cpp, and where assets come from."""

import json
import struct
from pathlib import Path

import pytest

from engine.text import TextAssets, TextError, load_text
from engine.weights.checkpoint_file import CheckpointError

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_cases.json").read_text())


def test_the_400_strings_have_llama_cpp_ids(assets: TextAssets) -> None:
    assert len(CASES) == 400
    wrong = [text for text, ids in CASES if assets.encoder.encode(text).tolist() != ids]
    assert not wrong


def test_the_400_strings_survive_a_round_trip(assets: TextAssets) -> None:
    wrong = [text for text, ids in CASES if assets.vocabulary.join(ids).decode() != text]
    assert not wrong


def test_what_the_default_model_says_of_itself(assets: TextAssets) -> None:
    assert (assets.bos_token, assets.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert assets.eos_token_ids == {0, 2}
    assert not assets.add_bos
    assert assets.chat_template is not None and "SmolLM" in assets.chat_template


def test_a_tokenizer_json_beside_an_unsupported_gguf_is_used(
    assets: TextAssets, model_path: Path, tmp_path: Path
) -> None:
    entry = b"tokenizer.ggml.pre" + struct.pack("<IQ", 8, 6)
    head = model_path.read_bytes()[: 4 << 20]
    assert head.count(entry + b"smollm") == 1
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(head.replace(entry + b"smollm", entry + b"poetry"))
        file.truncate(model_path.stat().st_size)
    with pytest.raises(TextError, match=r"model\.gguf.*'poetry'.*tokenizer\.json"):
        load_text(path)
    assets.tokenizer.save(str(tmp_path / "tokenizer.json"))
    beside = load_text(path)
    assert beside.encoder.encode("12 34").tolist() == assets.encoder.encode("12 34").tolist()
    assert beside.chat_template == assets.chat_template


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load_text(path)

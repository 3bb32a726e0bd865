"""Tokenizers from GGUF metadata, good and bad."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.text import TextAssets, TextError
from engine.text.from_gguf import UnsupportedTokenizer, assets_from_metadata
from engine.text.vocabulary import byte_alphabet

PATH = Path("model.gguf")
BYTES = tuple(byte_alphabet().values())


def small(**changes: object) -> dict[str, object]:
    """Metadata of a tokenizer with all bytes, "ab", "123" and three markers; None removes a key."""
    tokens = (*BYTES, "ab", "12", "123", "<|begin|>", "<|eot_id|>", "<tool>")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": (1,) * 259 + (3, 3, 4),
        "merges": ("a b", "1 2"),
        "bos_token_id": ids["<|begin|>"],
        "eos_token_id": ids["<|begin|>"],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": v for key, v in values.items() if v is not None}


def pieces(assets: TextAssets, text: str) -> list[str]:
    vocabulary = assets.vocabulary
    return [vocabulary.token_bytes(i).decode() for i in assets.encoder.encode(text).tolist()]


def test_qwen2_takes_single_digits_and_composes() -> None:
    assets = assets_from_metadata(PATH, small())
    assert pieces(assets, "ab123") == ["ab", "1", "2", "3"]
    composed = assets.encoder.encode("\u00e9").tolist()
    assert assets.encoder.encode("e\u0301").tolist() == composed


def test_llama_bpe_takes_three_digits_and_whole_words_without_merges() -> None:
    assets = assets_from_metadata(PATH, small(pre="llama-bpe"))
    assert pieces(assets, "123123 ab") == ["123", "123", " ", "ab"]
    decomposed = assets.encoder.encode("e\u0301").tolist()
    assert assets.vocabulary.join(decomposed) == b"e\xcc\x81"


def test_smollm_splits_digits_before_anything_else() -> None:
    assets = assets_from_metadata(PATH, small(pre="smollm"))
    assert pieces(assets, "ab12  3") == ["ab", "1", "2", " ", " ", "3"]


def test_markers_are_tokens_and_only_control_tokens_are_special() -> None:
    assets = assets_from_metadata(PATH, small())
    assert pieces(assets, "a<tool>b<|eot_id|>") == ["a", "<tool>", "b", "<|eot_id|>"]
    assert assets.vocabulary.special_ids == {259, 260}


def test_end_tokens_are_eos_eot_and_the_well_known() -> None:
    assert assets_from_metadata(PATH, small()).eos_token_ids == {259, 260}
    assert assets_from_metadata(PATH, small(eot_token_id=7)).eos_token_ids == {7, 259, 260}


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "llama-bpe", "bos_token_id": None}, False),
    ],
)
def test_whether_bos_is_added(changes: Mapping[str, object], add_bos: bool) -> None:
    assets = assets_from_metadata(PATH, small(**changes))
    assert assets.add_bos == add_bos
    with_special = assets.encoder.encode("a", add_special_tokens=True).tolist()
    assert with_special == ([259] if add_bos else []) + assets.encoder.encode("a").tolist()


def test_a_model_without_bos_eos_and_template() -> None:
    assets = assets_from_metadata(PATH, small(bos_token_id=None, eos_token_id=None))
    assert (assets.bos_token, assets.eos_token, assets.chat_template) == ("", "", None)


@pytest.mark.parametrize(
    "changes", [{"model": "llama"}, {"pre": "deepseek-llm"}, {"pre": None}, {"model": "bert"}]
)
def test_other_kinds_ask_for_a_tokenizer_json(changes: Mapping[str, object]) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"^model\.gguf: .*tokenizer\.json"):
        assets_from_metadata(PATH, small(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": None}, "model: is missing"),
        ({"model": 3}, "model: is int, not str"),
        ({"tokens": None}, "tokens: is missing"),
        ({"tokens": "abc"}, "tokens: is str, not tuple"),
        ({"tokens": (1, 2)}, "tokens: has elements that are not str"),
        ({"tokens": ("a",) * 262}, "tokens: some tokens occur twice"),
        ({"token_type": None}, "token_type: is missing"),
        ({"token_type": (1, 1)}, "token_type: has 2 entries for 262 tokens"),
        ({"merges": None}, "merges: is missing"),
        ({"merges": ("ab",)}, "merges: 'ab' is not two tokens"),
        ({"merges": ("a xyz",)}, "merges: .*xyz"),
        ({"bos_token_id": 262}, "bos_token_id: 262 is outside the vocabulary of 262"),
        ({"eos_token_id": -1}, "eos_token_id: -1 is outside"),
        ({"eot_token_id": True}, "eot_token_id: is bool, not int"),
        ({"add_bos_token": "yes"}, "add_bos_token: is str, not bool"),
    ],
)
def test_damaged_metadata_names_file_key_and_reason(
    changes: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(TextError, match=rf"^model\.gguf: tokenizer\.ggml\.{reason}"):
        assets_from_metadata(PATH, small(**changes))


def test_a_template_that_is_no_string() -> None:
    with pytest.raises(TextError, match="chat_template"):
        assets_from_metadata(PATH, {**small(), "tokenizer.chat_template": 1})

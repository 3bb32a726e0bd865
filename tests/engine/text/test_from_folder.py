"""Tokenizers from Hugging Face folders."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from engine.text import TextAssets, TextError, load_text
from engine.text.pre_tokenizers import qwen2
from engine.text.vocabulary import byte_alphabet


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def byte_level(folder: Path) -> Path:
    """A folder in the manner of Qwen2."""
    vocab = {token: token_id for token_id, token in enumerate(byte_alphabet().values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = qwen2()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "<end>"}, "bos_token": None})
    return folder


def sentencepiece(folder: Path) -> Path:
    """A folder in the manner of Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


def test_a_byte_level_folder(tmp_path: Path) -> None:
    assets = load_text(byte_level(tmp_path))
    ids = assets.encoder.encode("é, <tool> long<end>").tolist()
    assert assets.vocabulary.join(ids) == "é, <tool> long<end>".encode()
    assert [token_id for token_id in ids if assets.vocabulary.is_special(token_id)] == [256]
    assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("", "<end>", False)
    assert assets.eos_token_ids == {256}


def test_a_sentencepiece_folder(tmp_path: Path) -> None:
    assets = load_text(sentencepiece(tmp_path))
    ids = assets.encoder.encode("a aé", add_special_tokens=True).tolist()
    assert assets.vocabulary.join(ids) == "<s> a aé".encode()
    assert assets.add_bos and assets.bos_token == "<s>"
    assert assets.vocabulary.special_ids == {0, 1, 2}


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    byte_level(tmp_path)
    write(tmp_path, "config.json", {"eos_token_id": 5})
    assert load_text(tmp_path).eos_token_ids == {256, 5}
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8]})
    assert load_text(tmp_path).eos_token_ids == {256, 7, 8}


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    byte_level(tmp_path)
    assert load_text(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert load_text(tmp_path).chat_template == "d"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert load_text(tmp_path).chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_text(tmp_path).chat_template == "file"


def test_the_default_model_saved_as_a_folder_is_the_same(
    assets: TextAssets, tmp_path: Path
) -> None:
    assets.tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_text(tmp_path)
    ids = range(assets.vocabulary.size)
    assert again.vocabulary.special_ids == assets.vocabulary.special_ids
    assert all(again.vocabulary.token_bytes(i) == assets.vocabulary.token_bytes(i) for i in ids)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"has no tokenizer\.json"):
        load_text(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: "),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be read as JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: 'x' is not a list"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, reason: str) -> None:
    byte_level(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TextError, match=reason):
        load_text(tmp_path)


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TextError, match="decoder WordPiece is not supported"):
        load_text(tmp_path)

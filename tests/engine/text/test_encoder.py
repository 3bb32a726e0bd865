"""Slices have the very ids of one call over the whole text."""

import random
from base64 import b64encode
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.text import Encoder, TextAssets
from engine.text.default_model import find_default_model
from engine.text.from_gguf import assets_from_metadata
from engine.text.pre_tokenizers import cuts_are_safe, gpt2
from engine.weights.gguf import open_gguf

PRE_TYPES = ("smollm", "llama-bpe", "qwen2")
FRAGMENTS = [
    *"abYZ019 \n\t\r.,;:'!?-_|<>\x1c\x85\u0301",
    *"/+={}\"\\*&%#@$~^", "a1", "1a",
    "190", "00", "19", "  ", "\n\n", " \n", "'s", "'LL", "\u00a0", "\u3000", "。", "\uff0c",
    "中文", "한국", "ァひ", "é", "e\u0301", "\u1100\u1161\u11a8", "🙂", "\u200d", "\u2126", "²",
    "<|im_end|>", "<|im_start|>", "<file_sep>", "<|im_", "end|>",
]  # fmt: skip


@cache
def tokenizer_of(pre_type: str) -> Tokenizer:
    """The default model's vocabulary, and some numbers, behind a family's pre-tokenizer."""
    path = find_default_model()
    assert path is not None
    values = open_gguf(path).metadata
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, tuple) and isinstance(types, tuple)
    changes = {
        "tokenizer.ggml.pre": pre_type,
        "tokenizer.ggml.tokens": (*tokens, "00", "19", "190", "001"),
        "tokenizer.ggml.token_type": (*types, 1, 1, 1, 1),
    }
    return assets_from_metadata(path, {**values, **changes}).tokenizer


def one_shot(tokenizer: Tokenizer, text: str) -> list[int]:
    whole = tokenizer.encode(text, add_special_tokens=False)
    return [token_id for part in (whole, *whole.overflowing) for token_id in part.ids]


@pytest.mark.parametrize("pre_type", PRE_TYPES)
@settings(max_examples=200)
@given(text=st.lists(st.sampled_from(FRAGMENTS) | st.characters(codec="utf-8")).map("".join))
def test_a_text_cut_wherever_it_may_be(pre_type: str, text: str) -> None:
    tokenizer = tokenizer_of(pre_type)
    sliced = Encoder(tokenizer, slice_characters=1).encode(text)
    assert sliced.tolist() == one_shot(tokenizer, text)


def test_cuts_are_found_and_used() -> None:
    encoder = Encoder(tokenizer_of("smollm"), slice_characters=1)
    text = "one two,three<|im_end|>\nfour 5。六。"
    assert list(encoder.slices(text)) == [
        "one", " two", ",three<|im_end|>\nfour", " 5", "。六", "。"
    ]  # fmt: skip


def test_a_long_text_is_cut_near_the_slice_size(assets: TextAssets) -> None:
    text = "<|im_start|>user\nA long text, for 1 reader.<|im_end|>\n" * 2_000
    slices = list(assets.encoder.slices(text))
    assert "".join(slices) == text
    assert len(slices) == 7 and max(map(len, slices)) < 16_500
    ids = assets.encoder.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert ids.tolist() == one_shot(assets.tokenizer, text)


def test_encoded_data_is_cut(assets: TextAssets) -> None:
    data = b64encode(random.Random(1).randbytes(100_000)).decode()
    for text in (data, data.encode().hex(), data.replace("+", "%2B")):
        assert max(map(len, assets.encoder.slices(text))) < 17_000
        assert assets.encoder.encode(text).tolist() == one_shot(assets.tokenizer, text)


def test_a_text_without_a_cut_is_one_slice(assets: TextAssets) -> None:
    text = "ab-" * 20_000
    assert list(assets.encoder.slices(text)) == [text]
    assert assets.encoder.encode(text).tolist() == one_shot(assets.tokenizer, text)


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = gpt2()
    return tokenizer


def test_only_known_tokenizers_are_cut() -> None:
    assert cuts_are_safe(small_tokenizer())
    spaced = small_tokenizer()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower = small_tokenizer()
    lower.normalizer = normalizers.Lowercase()
    bare = small_tokenizer()
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not any(map(cuts_are_safe, (spaced, lower, bare)))


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a b>", normalized=False),
        AddedToken("<a,b>", normalized=False),
        AddedToken("<a>", normalized=False, rstrip=True),
        AddedToken("<a>", normalized=False, lstrip=True),
        AddedToken("<a>", normalized=False, single_word=True),
    ],
)
def test_added_tokens_that_reach_over_a_cut_forbid_it(token: AddedToken) -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([token])
    assert not cuts_are_safe(tokenizer)


def test_special_tokens_are_added_once_however_manyslices(model_path: Path) -> None:
    values = {**open_gguf(model_path).metadata, "tokenizer.ggml.add_bos_token": True}
    assets = assets_from_metadata(model_path, values)
    encoder = Encoder(assets.tokenizer, slice_characters=1)
    assert assets.add_bos and encoder.prefix_ids == (1,)
    assert encoder.encode("a b", add_special_tokens=True).tolist()[0] == 1
    for text in ("", "a b c d"):
        expected = assets.tokenizer.encode(text).ids
        assert encoder.encode(text, add_special_tokens=True).tolist() == expected
        assert encoder.encode(text).tolist() == expected[1:]


def test_lone_surrogates_are_an_error(assets: TextAssets) -> None:
    with pytest.raises(UnicodeEncodeError):
        assets.encoder.encode("a\ud800b")


def test_a_panic_of_the_library_is_an_exception() -> None:
    """Some texts exhaust the backtracking of some patterns, which the library answers by a panic;
    unconverted it would pass every `except Exception` and end what it passes."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex("(?=(a+)+b)")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    encoder = Encoder(tokenizer)
    with pytest.raises(RuntimeError, match=r"the tokenizer failed: .*retry-limit"):
        encoder.encode("a" * 40)
    assert encoder.encode("b").tolist() == []

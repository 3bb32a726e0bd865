"""Bytes of tokens."""

from engine.text import TextAssets, Vocabulary
from engine.text.vocabulary import byte_alphabet, byte_level_pieces, sentencepiece_pieces


def test_the_alphabet_has_a_character_of_its_own_for_each_byte() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert (alphabet[ord("A")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("A", "Ġ", "Ċ")


def test_byte_level_tokens_are_inverted_and_added_ones_are_literal() -> None:
    tokens = ["Ġhi", "Ã©", "", "ð", "<|é|>", "日"]
    assert byte_level_pieces(tokens, [4]) == (
        b" hi", "é".encode(), b"", b"\xf0", "<|é|>".encode(), "日".encode(),
    )  # fmt: skip


def test_sentencepiece_tokens() -> None:
    tokens = ["<s>", "▁hi▁you", "<0x0A>", "<0xff>", "é", "▁"]
    assert sentencepiece_pieces(tokens, [0, 5]) == (
        b"<s>", b" hi you", b"\n", b"<0xff>", "é".encode(), "▁".encode(),
    )  # fmt: skip


def test_every_token_of_the_default_model_is_what_the_library_decodes(assets: TextAssets) -> None:
    vocabulary = assets.vocabulary
    assert vocabulary.size == 49_152
    ids = range(vocabulary.size)
    mine = [vocabulary.token_bytes(token_id).decode(errors="replace") for token_id in ids]
    assert mine == assets.tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)


def test_special_tokens_have_bytes_but_release_none(assets: TextAssets) -> None:
    vocabulary = assets.vocabulary
    assert vocabulary.special_ids == set(range(17))
    assert (vocabulary.is_special(2), vocabulary.is_special(17)) == (True, False)
    assert vocabulary.token_bytes(2) == b"<|im_end|>"
    assert vocabulary.text_bytes(2) == b""
    assert vocabulary.text_bytes(19556) == vocabulary.token_bytes(19556) == b"Hello"


def test_the_longest_token_bounds_all(assets: TextAssets) -> None:
    vocabulary = assets.vocabulary
    lengths = [len(vocabulary.token_bytes(token_id)) for token_id in range(vocabulary.size)]
    assert max(lengths) == vocabulary.max_token_bytes


def test_ids_of_a_padded_head_have_no_bytes() -> None:
    vocabulary = Vocabulary((b"a",), ())
    assert (vocabulary.token_bytes(1), vocabulary.text_bytes(1)) == (b"", b"")

"""A vocabulary of single bytes, to try grammars out with."""

from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

EOS: Final = 256


class _Bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    special_token_ids = (EOS,)
    eos_token_id = EOS
    bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER: Final = LLTokenizer(TokenizerWrapper(_Bytes()))

"""The pre-tokenizers of byte-level BPE models, and where a text may be cut before them.

Patterns are those of the models' published tokenizer.json files.
"""

import re
from typing import Final

from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_LETTERS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN: Final = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_PATTERN: Final = rf"{_LETTERS}|\p{{N}}|{_REST}"


def gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), gpt2()])


def llama3() -> PreTokenizer:
    return _split(LLAMA3_PATTERN)


def qwen2() -> PreTokenizer:
    return _split(QWEN2_PATTERN)


def _split(pattern: str) -> PreTokenizer:
    isolated = Split(Regex(pattern), behavior="isolated", invert=False)
    return Sequence([isolated, ByteLevel(add_prefix_space=False, use_regex=False)])


SAFE_CUT: Final = re.compile(
    r"(?<=[!-~])(?= )"
    r"|(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3])"
    r"(?=[\n.,;:/+={}\"\\*&%#@$~^\u3001\u3002\uff0c\uff0e\uff1a\uff1b\uff01\uff1f])"
    r"|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])"
)
"""Where the four pre-tokenizers above always begin a new piece, whatever stands before and after.

No alternative of their patterns matches a visible character and then a space, a letter or digit
and then one of these marks, or a letter beside a digit; their only lookahead looks at what follows
white space, and no white space stands before a cut. NFC composes none of the characters after a cut
with what stands before it.
"""


def cuts_are_safe(tokenizer: Tokenizer) -> bool:
    """Whether tokens of a text are those of its slices at SAFE_CUTs, one after the other.

    True for the four pre-tokenizers above, with no or NFC normalisation, where no added token has
    a cut inside or looks at its neighbours.
    """
    if _state(tokenizer.normalizer) not in (b"", _state(normalizers.NFC())):
        return False
    known = {_state(each) for each in (gpt2(), smollm(), llama3(), qwen2())}
    if _state(tokenizer.pre_tokenizer) not in known:
        return False
    return not any(
        token.lstrip or token.rstrip or token.single_word or SAFE_CUT.search(token.content)
        for token in tokenizer.get_added_tokens_decoder().values()
    )


def _state(part: PreTokenizer | normalizers.Normalizer | None) -> bytes:
    """A part of a tokenizer as its JSON, which compares as a value."""
    return b"" if part is None else bytes(part.__getstate__())

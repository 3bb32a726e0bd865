"""Token ids to the bytes they stand for."""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

_NO_BYTE = -1


class Vocabulary:
    """The bytes of each token, inverted once when it is built.

    Special tokens (chat markers, end of sequence) have bytes, their literal text, but release
    none: `text_bytes` is what a reader of the answer may see.
    """

    __slots__ = ("_max_token_bytes", "_pieces", "_special_ids")

    def __init__(self, pieces: tuple[bytes, ...], special_ids: Collection[int]) -> None:
        """pieces: bytes by token id."""
        self._pieces = pieces
        self._special_ids = frozenset(special_ids)
        self._max_token_bytes = max(map(len, pieces), default=0)

    @property
    def size(self) -> int:
        """Number of ids. A model's head may be padded beyond it: such ids have no bytes."""
        return len(self._pieces)

    @property
    def max_token_bytes(self) -> int:
        """Length of the longest token, special ones included."""
        return self._max_token_bytes

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; a special token's literal text. b"" for a padded id."""
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that a generated token releases: none for a special token."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def join(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of tokens one after the other, special ones with their literal text."""
        ids = list(token_ids)
        try:
            return b"".join(map(self._pieces.__getitem__, ids))
        except IndexError:  # a padded id among them
            return b"".join(map(self.token_bytes, ids))


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte value.

    Printable Latin-1 stands for itself, the other bytes for U+0100 onwards in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return alphabet


def byte_level_pieces(tokens: Sequence[str], literal_ids: Collection[int]) -> tuple[bytes, ...]:
    """Bytes of tokens written in GPT-2's byte alphabet.

    `literal_ids` (added tokens), and tokens with a character outside the alphabet, stand for their
    own UTF-8 text.
    """
    alphabet = byte_alphabet()
    byte_of = np.full(256 + len(alphabet) + 1, _NO_BYTE, dtype=np.int16)
    for byte, character in alphabet.items():
        byte_of[ord(character)] = byte
    characters = np.frombuffer("".join(tokens).encode("utf-32-le"), dtype="<u4")
    values = byte_of[np.minimum(characters, len(byte_of) - 1)]
    ends = list(accumulate(map(len, tokens), initial=0))
    data = values.astype(np.uint8).tobytes()
    pieces = [data[start:end] for start, end in pairwise(ends)]
    foreign = np.searchsorted(ends, np.flatnonzero(values == _NO_BYTE), side="right") - 1
    for token_id in {*literal_ids, *foreign.tolist()}:
        pieces[token_id] = tokens[token_id].encode()
    return tuple(pieces)


def sentencepiece_pieces(tokens: Sequence[str], literal_ids: Collection[int]) -> tuple[bytes, ...]:
    """Bytes of sentencepiece tokens: U+2581 is a space and <0xNN> a byte; others their text."""
    byte_tokens = {f"<0x{byte:02X}>": bytes((byte,)) for byte in range(256)}
    literal = frozenset(literal_ids)
    return tuple(
        token.encode()
        if token_id in literal
        else byte_tokens.get(token) or token.replace("\u2581", " ").encode()
        for token_id, token in enumerate(tokens)
    )

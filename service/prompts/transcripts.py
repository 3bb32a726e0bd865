"""Former prompts with their answers, found again by the text that they stand for.

Agents send their whole history with every turn. What the model said in it is found here as the
tokens it chose, which are in the prefix cache; tokenised again they are often others, which are
not. It is found by text alone, whatever dialect or field the text came back in.
"""

import re
from collections import OrderedDict
from collections.abc import Collection
from threading import Lock
from typing import Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.int32]

MAX_BYTES: Final = 64 << 20
_ENTRY_BYTES: Final = 300
"""What an entry takes beside its token ids: its key, the array's head, its place in the order."""


class PromptText:
    """The text of a rendered prompt, as far as it takes to recognise what will begin with it."""

    __slots__ = ("_hash",)

    def __init__(self, hash: xxhash.xxh3_128) -> None:
        self._hash = hash

    def followed_by(self, answer: bytes) -> bytes:
        """The key of this text with an answer after it."""
        hash = self._hash.copy()
        hash.update(answer)
        return hash.digest()


class Transcripts:
    """Token ids by the hash of their text, the least recently used dropped for new ones.

    Threads may use it at the same time. The hash says only where to look: who takes over ids
    compares their text first (`TokenReplay.splice`).
    """

    def __init__(self, specials: Collection[bytes], max_bytes: int = MAX_BYTES) -> None:
        """`specials` are the texts of the special tokens; an answer ends before one of them."""
        some = sorted((text for text in specials if text), key=len, reverse=True)
        self._special = re.compile(b"|".join(map(re.escape, some)) or b"(?!)")
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._lock = Lock()

    def find(self, scope: str, text: bytes) -> tuple[TokenIds | None, PromptText]:
        """The longest of the scope's entries that `text` begins with, as far as hashes tell, and
        `text` as what may be added to."""
        hash = xxhash.xxh3_128(f"{len(scope)}:{scope}".encode())
        keys: list[bytes] = []
        start = 0
        for special in self._special.finditer(text):
            hash.update(text[start : special.start()])
            keys.append(hash.digest())
            start = special.start()
        hash.update(text[start:])
        with self._lock:
            for key in reversed(keys):
                if (found := self._entries.get(key)) is not None:
                    self._entries.move_to_end(key)
                    return found, PromptText(hash)
        return None, PromptText(hash)

    def add(self, key: bytes, token_ids: TokenIds) -> None:
        """Remember the ids of a text under its key (`PromptText.followed_by`)."""
        size = token_ids.nbytes + _ENTRY_BYTES
        with self._lock:
            former = self._entries.pop(key, None)
            if former is not None:
                self._num_bytes -= former.nbytes + _ENTRY_BYTES
            if size > self._max_bytes:
                return
            self._entries[key] = token_ids
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._num_bytes -= dropped.nbytes + _ENTRY_BYTES

    def audit(self) -> None:
        """Raises AssertionError where the books are wrong."""
        with self._lock:
            held = sum(ids.nbytes + _ENTRY_BYTES for ids in self._entries.values())
            assert held == self._num_bytes <= self._max_bytes

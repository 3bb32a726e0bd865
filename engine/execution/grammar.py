"""Grammars: which tokens may come next, so that an output matches what its request asked for.

A grammar is compiled on a thread of its own while the prompt is computed. What cannot be compiled,
or becomes too complex on the way, is the fault of its request and of no other.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from numpy.typing import NDArray

from engine.text import Encoder, Vocabulary
from kernels.contract import Float32Array

MAX_FAULT_CHARS: Final = 300


class TokenMatcher:
    """One output's place in its grammar: it moves with every token, and never back."""

    def __init__(self, compiled: "Future[LLMatcher]", vocab_size: int) -> None:
        """vocab_size: tokens that have bytes; a head's padding beyond them is never allowed."""
        self._compiled = compiled
        self._bits: NDArray[np.uint32] = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._vocab_size = vocab_size

    @property
    def fault(self) -> str:
        """Why the grammar cannot be used; "" while it can. Waits for the compiler."""
        try:
            matcher = self._compiled.result()
        except Exception as error:  # whatever the compiler raises is about this grammar
            return f"the grammar cannot be used: {error}"[:MAX_FAULT_CHARS]
        if not matcher.is_error():
            return ""
        return f"the grammar cannot be used: {matcher.get_error()}"[:MAX_FAULT_CHARS]

    @property
    def complete(self) -> bool:
        """Whether the output matches and nothing can be added to it."""
        return not self.fault and self._compiled.result().is_stopped()

    def mask(self, row: Float32Array) -> None:
        """Rule out in float32 [vocab], in place, what must not come next: everything, once there
        is a `fault`."""
        if not self.fault:
            bits = self._bits
            self._compiled.result().unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.fault:
            row[:] = -np.inf
            return
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        row[: self._vocab_size][allowed[: self._vocab_size] == 0] = -np.inf
        row[self._vocab_size :] = -np.inf

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model likes: of each of them `mask`, when its turn
        comes, leaves only that one. Empty where there is a choice, or a `fault`."""
        if self.fault:
            return []
        token_ids: list[int] = self._compiled.result().compute_ff_tokens()
        return token_ids

    def accept(self, token_id: int) -> None:
        """Move on by a token; one that does not match is a `fault`."""
        if not self.fault:
            self._compiled.result().consume_token(token_id)


class GrammarCompiler:
    """Compiles grammars for one model's tokens; the first one also builds their tree."""

    def __init__(
        self, vocabulary: Vocabulary, encoder: Encoder, eos_token_ids: Collection[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._eos_token_ids = sorted(eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None

    def start(self, grammar: str) -> TokenMatcher:
        """A matcher that is at the beginning of its output, perhaps still being compiled."""
        return TokenMatcher(self._thread.submit(self._compile, grammar), self._vocabulary.size)

    def close(self) -> None:
        """End the thread, after the grammar it compiles."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            source = _Tokens(self._vocabulary, self._encoder.encode, self._eos_token_ids)
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(source),
                n_vocab=self._vocabulary.size,
                eos_token=self._eos_token_ids,
            )
        return LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )


class _Tokens:
    """The model's tokens in the form that llguidance reads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], NDArray[np.int32]],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._encode = encode
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.size)]
        self.special_token_ids = sorted({*vocabulary.special_ids, *eos_token_ids})
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Raises TypeError for bytes, which says that only text is taken."""
        if not isinstance(text, str):
            raise TypeError("text is expected")
        ids: list[int] = self._encode(text).tolist()
        return ids

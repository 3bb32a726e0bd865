"""What a sampled token means for its request: bytes to release, and whether it is the end."""

from collections.abc import Collection
from dataclasses import dataclass

from engine.scheduling.request import Request
from engine.text import Vocabulary
from engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """`text` may be shown now; `reason` is None while the request goes on."""

    text: bytes
    reason: FinishReason | None = None
    stop: bytes = b""
    stop_token_id: int = -1


@dataclass(frozen=True, slots=True)
class OutputRules:
    """Ends a request at an end-of-sequence or stop token (counted, shows no bytes), at a stop
    string (none of it is shown), once its grammar lets nothing more come, or at its length (what
    was held back for a stop is shown).

    `include_stop` shows the string or the stop token after all. The first `min_tokens` tokens are
    not searched for stop strings. A request's `shown_token_ids` show their text.
    """

    vocabulary: Vocabulary
    eos_token_ids: Collection[int]

    def take(self, request: Request, token_id: int) -> Outcome:
        """Append the token to the request and say what follows from it."""
        request.append(token_id)
        matcher = request.stop_matcher
        sampling = request.sampling
        eos = token_id in self.eos_token_ids and not sampling.ignore_eos
        if eos or token_id in sampling.stop_token_ids:
            held = matcher.flush() if matcher else b""
            if sampling.include_stop and not eos:
                held += self.vocabulary.text_bytes(token_id)
            return Outcome(held, FinishReason.STOP, stop_token_id=token_id)
        shown = token_id in request.shown_token_ids
        vocabulary = self.vocabulary
        text = vocabulary.token_bytes(token_id) if shown else vocabulary.text_bytes(token_id)
        if matcher and request.num_output_tokens > sampling.min_tokens:
            text, stop = matcher.feed(text)
            if stop is not None:
                text = text + stop if sampling.include_stop else text
                return Outcome(text, FinishReason.STOP, stop=stop)
        if request.grammar_complete:
            return Outcome(text + matcher.flush() if matcher else text, FinishReason.STOP)
        if request.num_output_tokens < request.max_new_tokens:
            return Outcome(text)
        return Outcome(text + matcher.flush() if matcher else text, FinishReason.LENGTH)

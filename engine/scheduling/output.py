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
    string (none of it is shown), or at its length (what was held back for a stop is shown)."""

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
            return Outcome(held, FinishReason.STOP, stop_token_id=token_id)
        text = self.vocabulary.text_bytes(token_id)
        if matcher:
            text, stop = matcher.feed(text)
            if stop is not None:
                return Outcome(text, FinishReason.STOP, stop=stop)
        if request.num_output_tokens < request.max_new_tokens:
            return Outcome(text)
        return Outcome(text + matcher.flush() if matcher else text, FinishReason.LENGTH)

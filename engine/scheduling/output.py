"""What a sampled token means for its request: bytes to release, and whether it is the end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from engine.execution.sampler import SampledToken, Sampler
from engine.scheduling.request import Request
from engine.scheduling.step_plan import ScheduledChunk
from engine.text import Vocabulary
from engine.types import FinishReason, SamplingParams, TokenLogprobs


class Outcome(msgspec.Struct, frozen=True):
    """`text` may be shown now; `reason` is None while the request goes on."""

    text: bytes
    reason: FinishReason | None = None
    stop: bytes = b""
    stop_token_id: int = -1


class Said(msgspec.Struct, frozen=True):
    """What a request says after a step, at least one token: the end of the tokens that the step
    computed for it and that stay, and how many of those it says were forced, and were drafts."""

    token_ids: list[int]
    text: bytes
    logprobs: tuple[TokenLogprobs, ...]
    outcome: Outcome
    end: int
    num_forced: int
    num_accepted: int


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
        return self._judge(request, token_id)

    def end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The tokens that end such a request."""
        eos = () if sampling.ignore_eos else self.eos_token_ids
        return frozenset((*sampling.stop_token_ids, *eos))

    def said(self, request: Request, token_id: int) -> Said:
        """Of a token that did not end its request and was appended already, the only one of its
        step."""
        outcome = self._judge(request, token_id)
        return Said([token_id], outcome.text, (), outcome, request.num_tokens - 1, 0, 0)

    def _judge(self, request: Request, token_id: int) -> Outcome:
        """What follows from the last token of a request."""
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

    def say(self, chunk: ScheduledChunk, token: SampledToken, sampler: Sampler, row: int) -> Said:
        """Take a token that was sampled from `row`, those that a grammar forces after it, and, for
        as long as these are the chunk's drafts, what the rows of the drafts give.

        Each is sampled when all before it are known: as it would be in a step of its own. Where a
        row gives none the next step computes it again, and says why.
        """
        request, drafts = chunk.request, chunk.drafts
        first = request.num_tokens
        said: list[int] = []
        text, scores = b"", list[TokenLogprobs]()
        num_sampled = 0
        sampled: SampledToken | None = token
        while sampled is not None:
            num_sampled += 1
            outcome = self.take(request, sampled.token_id)
            said.append(sampled.token_id)
            text += outcome.text
            if sampled.logprobs is not None:
                scores.append(sampled.logprobs)
            for token_id in request.forced() if outcome.reason is None else ():
                outcome = self.take(request, token_id)
                said.append(token_id)
                text += outcome.text
                if outcome.reason is not None:
                    break
            if outcome.reason is not None or tuple(said) != drafts[: len(said)]:
                break
            sampled = sampler.choose(
                row + len(said), request.sampling, request.num_tokens, request.logit_rules
            )
        num_right = min(_num_equal(said, drafts), len(said) - 1)
        num_forced = len(said) - num_sampled
        end = first + num_right
        return Said(said, text, tuple(scores), outcome, end, num_forced, num_sampled - 1)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

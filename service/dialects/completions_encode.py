"""OpenAI Completions, the answer: events of several generations to JSON and SSE frames."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.text import Utf8Assembler, Vocabulary
from engine.types import FinishReason, TokenLogprobs
from service.choices import Choice, total_usage
from service.dialects import wire
from service.dialects.chat_encode import (
    DONE,
    answer_head,
    prompt_logprobs,
    stop_reason,
    usage_fields,
)
from service.dialects.completions_decode import CompletionRequest
from service.dialects.logprobs import LEAST_LOGPROB
from service.errors import from_failure, openai_error
from service.events import (
    Admitted,
    Completed,
    Event,
    Failed,
    PromptScored,
    TextDelta,
    TokenText,
)
from service.model_card import ModelCard

_to_json = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """A prompt as text and as tokens."""

    text: str
    token_ids: NDArray[np.int32]


_PLAIN_END: Final = b',"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionStream:
    """Encodes one streamed answer, each event to whole SSE frames.

    Usage rides on the last chunk with a finish reason, or, where `include_usage` asked for it, on
    a last chunk of its own.
    """

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[CompletionPrompt],
        card: ModelCard,
        vocabulary: Vocabulary,
    ) -> None:
        self._request = request
        self._head = b"data: " + _to_json(_head(request, card))[:-1]
        self._choices = [
            _ChoiceStream(request, prompt, vocabulary)
            for prompt in prompts
            for _ in range(request.n)
        ]
        self._texts = [
            self._head + b',"choices":[{"index":%d,"text":' % index
            for index in range(len(self._choices))
        ]
        self._ends: dict[int, Completed] = {}

    def encode(self, event: Event, index: int) -> bytes:
        """The frames of an event of one choice."""
        if isinstance(event, TextDelta) and not event.tokens:
            text = wire.one_line(_to_json(event.text))
            return b"".join((self._texts[index], text, _PLAIN_END))
        if isinstance(event, Failed):
            return b"data: " + openai_error(from_failure(event)) + b"\n\n"
        fields = self._choices[index].fields(event)
        if fields is None:
            return b""
        chunk = self._chunk(index, fields)
        if not isinstance(event, Completed):
            return chunk + b"}\n\n"
        self._ends[index] = event
        if len(self._ends) < len(self._choices):
            return chunk + b"}\n\n"
        ends = [self._ends[each] for each in range(len(self._choices))]
        usage = b',"usage":' + _to_json(usage_fields(total_usage(ends, self._request.n)))
        if self._request.include_usage:
            chunk += b"}\n\n" + self._head + b',"choices":[]'
        return chunk + usage + b"}\n\n" + DONE

    def keep_alive(self) -> bytes:
        """A chunk that says nothing."""
        return self._chunk(0, {"text": "", "logprobs": None, "finish_reason": None}) + b"}\n\n"

    def _chunk(self, index: int, fields: dict[str, object]) -> bytes:
        choice = wire.one_line(_to_json({"index": index, **fields}))
        return b"".join((self._head, b',"choices":[', choice, b"]"))


class _ChoiceStream:
    """What the chunks of one choice say."""

    def __init__(
        self, request: CompletionRequest, prompt: CompletionPrompt, vocabulary: Vocabulary
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._table = _TokenTable(vocabulary, request.options.logprobs or 0)
        self._scored: list[TokenLogprobs] = []

    def fields(self, event: Event) -> dict[str, object] | None:
        """Of the chunk for an event; None for no chunk."""
        match event:
            case Admitted():
                scored = not self._request.scores_echo or len(self._prompt.token_ids) == 1
                return self._echo() if self._request.echo and scored else None
            case PromptScored():
                if not self._request.scores_echo:
                    return None
                self._scored += event.logprobs
                return self._echo() if self._all_scored else None
            case TextDelta():
                logprobs = self._table.of_output(event.tokens)
                return {"text": event.text, "logprobs": logprobs, "finish_reason": None}
            case Completed():
                return {
                    "text": "",
                    "logprobs": None,
                    "finish_reason": _finish_reason(event),
                    **_extras(self._request, self._prompt, event),
                }
            case _:
                return None

    @property
    def _all_scored(self) -> bool:
        return len(self._scored) == len(self._prompt.token_ids) - 1

    def _echo(self) -> dict[str, object]:
        scores = self._request.scores_echo
        logprobs = self._table.of_prompt(self._prompt, self._scored) if scores else None
        return {"text": self._prompt.text, "logprobs": logprobs, "finish_reason": None}


def encode_completion(
    request: CompletionRequest,
    prompts: Sequence[CompletionPrompt],
    choices: Sequence[Choice],
    card: ModelCard,
    vocabulary: Vocabulary,
) -> bytes:
    """The unstreamed answer: `request.n` choices for each prompt, in order."""
    ends = [choice.ended for choice in choices]
    fields = {
        **_head(request, card),
        "choices": [
            {
                "index": index,
                **_choice(request, prompts[index // request.n], choice, vocabulary),
                **_scored_prompt(request, prompts[index // request.n], choice, vocabulary),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_fields(total_usage(ends, request.n)),
    }
    return _to_json(fields)


def _choice(
    request: CompletionRequest, prompt: CompletionPrompt, choice: Choice, vocabulary: Vocabulary
) -> dict[str, object]:
    table = _TokenTable(vocabulary, request.options.logprobs or 0)
    logprobs: _TextLogprobs | None = None
    if request.options.logprobs is not None:
        logprobs = _TextLogprobs()
        if request.scores_echo:
            logprobs.add(table.of_prompt(prompt, choice.scored))
        logprobs.add(table.of_output(choice.answer.tokens))
    return {
        "text": prompt.text + choice.answer.text if request.echo else choice.answer.text,
        "logprobs": logprobs,
        "finish_reason": _finish_reason(choice.ended),
        **_extras(request, prompt, choice.ended),
    }


def _scored_prompt(
    request: CompletionRequest, prompt: CompletionPrompt, choice: Choice, vocabulary: Vocabulary
) -> dict[str, object]:
    """vLLM's `prompt_logprobs`, on the first choice of each prompt."""
    num_top = request.prompt_logprobs
    if num_top is None or len(choice.scored) != len(prompt.token_ids) - 1:
        return {}
    shown = (
        TokenLogprobs(each.logprob, each.top_ids[:num_top], each.top_logprobs[:num_top])
        for each in choice.scored
    )
    ids = prompt.token_ids.tolist()
    return {"prompt_logprobs": prompt_logprobs(ids, shown, vocabulary)}


@dataclass(slots=True)
class _TextLogprobs:
    """The wire's `logprobs`: four lists, an entry of each for a token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, more: "_TextLogprobs") -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


class _TokenTable:
    """Tokens of one choice's text, in order, with the character of the text each begins at.

    Offsets count from the start of the choice's text, the echoed prompt included. The tokens of
    a stop string begin beyond the end of the text, which does not show them.
    """

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._utf8 = Utf8Assembler()
        self._length = 0

    def of_prompt(self, prompt: CompletionPrompt, scored: Iterable[TokenLogprobs]) -> _TextLogprobs:
        """Nothing scores the first token; where it was put before the text it has no length."""
        table = _TextLogprobs()
        vocabulary = self._vocabulary
        first, *rest = prompt.token_ids.tolist()
        text = vocabulary.token_bytes(first).decode("utf-8", "replace")
        hidden = vocabulary.is_special(first) and not prompt.text.startswith(text)
        self._add(table, first, None, b"" if hidden else vocabulary.token_bytes(first))
        for token_id, score in zip(rest, scored, strict=True):
            self._add(table, token_id, score, vocabulary.token_bytes(token_id))
        self._utf8 = Utf8Assembler()
        self._length = len(prompt.text)
        return table

    def of_output(self, tokens: Iterable[TokenText]) -> _TextLogprobs:
        table = _TextLogprobs()
        for token in tokens:
            shown = self._vocabulary.text_bytes(token.token_id)
            self._add(table, token.token_id, token.logprobs, shown)
        return table

    def _add(
        self, table: _TextLogprobs, token_id: int, score: TokenLogprobs | None, shown: bytes
    ) -> None:
        table.tokens.append(self._name(token_id))
        table.text_offset.append(self._length)
        table.token_logprobs.append(None if score is None else _shown(score.logprob))
        table.top_logprobs.append(None if score is None else self._likeliest(token_id, score))
        self._length += len(self._utf8.feed(shown))

    def _likeliest(self, token_id: int, score: TokenLogprobs) -> dict[str, float]:
        """The token itself is always there, also beyond the number asked for."""
        top = zip(score.top_ids[: self._num_top], score.top_logprobs[: self._num_top], strict=True)
        likeliest = {self._name(each): _shown(logprob) for each, logprob in top}
        likeliest.setdefault(self._name(token_id), _shown(score.logprob))
        return likeliest

    def _name(self, token_id: int) -> str:
        """The text of a token; where its bytes are none, they are spelled as OpenAI does."""
        data = self._vocabulary.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _shown(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _head(request: CompletionRequest, card: ModelCard) -> dict[str, object]:
    return answer_head(request.id, "text_completion", card, request.service_tier)


def _finish_reason(end: Completed) -> str:
    return "length" if end.finish_reason is FinishReason.LENGTH else "stop"


def _extras(
    request: CompletionRequest, prompt: CompletionPrompt, end: Completed
) -> dict[str, object]:
    """What a choice has beyond OpenAI's fields, as vLLM names it."""
    extras: dict[str, object] = {}
    reason = stop_reason(request.options, end)
    if reason is not None:
        extras["stop_reason"] = reason
    if request.return_token_ids:
        extras["prompt_token_ids"] = prompt.token_ids.tolist()
        extras["token_ids"] = end.token_ids
    return extras

"""OpenAI Chat Completions, the answer: events of the generation path to JSON and SSE frames."""

import time
from collections.abc import Iterable, Sequence

import msgspec

from engine.text import Vocabulary
from engine.types import FinishReason, TokenLogprobs, unpack_tokens
from service.answer import Answer
from service.choices import Choice, total_usage
from service.conversation import GenerationOptions, JSONValue, ToolCall
from service.dialects import wire
from service.dialects.chat_decode import ChatRequest
from service.dialects.logprobs import LEAST_LOGPROB, shown_tokens
from service.errors import from_failure, openai_error
from service.events import (
    Admitted,
    Completed,
    Event,
    Failed,
    PromptScored,
    ReasoningDelta,
    TextDelta,
    TokenText,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
    Usage,
)
from service.model_card import ModelCard

DONE = b"data: [DONE]\n\n"
_to_json = msgspec.json.encode


class ChatStream:
    """Encodes one streamed answer, each event to whole SSE frames.

    What is the same in every chunk of an answer is encoded once. Usage rides on the last chunk
    with a finish reason, or, where `include_usage` asked for it, on a last chunk of its own.
    """

    def __init__(self, request: ChatRequest, card: ModelCard, vocabulary: Vocabulary) -> None:
        self._include_usage = request.include_usage
        self._ends: dict[int, Completed] = {}
        self._head = b"data: " + _to_json(_head(request, card, "chat.completion.chunk"))[:-1]
        self._choices = [
            _ChoiceStream(request, self._head, index, vocabulary) for index in range(request.n)
        ]

    def encode(self, event: Event, index: int = 0) -> bytes:
        """The frames of an event of one choice."""
        frame = self._choices[index].encode(event)
        if not isinstance(event, Completed):
            return frame
        self._ends[index] = event
        if len(self._ends) < len(self._choices):
            return frame + b"}\n\n"
        ends = [self._ends[each] for each in range(len(self._choices))]
        usage = b',"usage":' + _to_json(usage_fields(total_usage(ends, len(ends)))) + b"}\n\n"
        if self._include_usage:
            return frame + b"}\n\n" + self._head + b',"choices":[]' + usage + DONE
        return frame + usage + DONE

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: some clients time out between chunks, not bytes."""
        return self._choices[0].keep_alive()


class _ChoiceStream:
    """The chunks of one choice; the last one is left open for the usage."""

    def __init__(
        self, request: ChatRequest, head: bytes, index: int, vocabulary: Vocabulary
    ) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._index = index
        self._head = head
        self._delta = head + b',"choices":[{"index":%d,"delta":' % index
        self._content = self._delta + b'{"content":'

    def encode(self, event: Event) -> bytes:
        match event:
            case Admitted():
                return self._first(event)
            case PromptScored():
                return b""
            case TextDelta():
                return self._text(event)
            case ReasoningDelta():
                return self._chunk(b'{"reasoning":' + wire.one_line(_to_json(event.text)) + b"}")
            case ToolCallStarted():
                return self._chunk(b'{"tool_calls":[' + _to_json(_call_head(event)) + b"]}")
            case ToolCallDelta():
                return self._arguments(event)
            case ToolCallDone():
                return b""
            case Completed():
                return self._end(event)
            case Failed():
                return b"data: " + openai_error(from_failure(event)) + b"\n\n"

    def keep_alive(self) -> bytes:
        return self._chunk(b'{"content":""}')

    def _first(self, event: Admitted) -> bytes:
        role = b'{"role":"assistant","content":""}'
        if self._index or not self._request.return_token_ids:
            return self._chunk(role)
        ids = _to_json(unpack_tokens(event.token_ids).tolist())
        return self._chunk(role)[: -len(b"}\n\n")] + b',"prompt_token_ids":' + ids + b"}\n\n"

    def _chunk(self, delta: bytes) -> bytes:
        return self._delta + delta + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def _text(self, event: TextDelta) -> bytes:
        text = wire.one_line(_to_json(event.text))
        logprobs = _to_json(_logprobs(event.tokens, self._vocabulary)) if event.tokens else b"null"
        return b"".join(
            (self._content, text, b'},"logprobs":', logprobs, b',"finish_reason":null}]}\n\n')
        )

    def _arguments(self, event: ToolCallDelta) -> bytes:
        """Only the new piece: clients join the strings of a call, its id and name too."""
        text = wire.one_line(_to_json(event.arguments))
        return self._chunk(
            b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (event.index, text)
        )

    def _end(self, event: Completed) -> bytes:
        reason = _to_json(_finish_reason(event))
        extras = b"".join(
            b',"%b":%b' % (name.encode(), _to_json(value))
            for name, value in _extras(self._request, event).items()
        )
        return self._delta + b'{},"logprobs":null,"finish_reason":' + reason + extras + b"}]"


def encode_answer(
    request: ChatRequest,
    prompt: bytes,
    choices: Sequence[Choice],
    card: ModelCard,
    vocabulary: Vocabulary,
) -> bytes:
    """The unstreamed answer; `prompt` holds the packed ids of the prompt's tokens."""
    asked = request.generation.options.logprobs is not None
    ends = [choice.ended for choice in choices]
    fields: dict[str, object] = {
        **_head(request, card, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _message(choice.answer),
                "logprobs": _logprobs(choice.answer.tokens, vocabulary) if asked else None,
                "finish_reason": _finish_reason(choice.ended),
                **_extras(request, choice.ended),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_fields(total_usage(ends, len(ends))),
    }
    scores_prompt = request.generation.options.prompt_logprobs is not None
    ids: list[int] = []  # not where nobody asks for them: a long prompt has very many
    if request.return_token_ids or scores_prompt:
        ids = unpack_tokens(prompt).tolist()
    if request.return_token_ids:
        fields["prompt_token_ids"] = ids
    if scores_prompt:
        fields["prompt_logprobs"] = prompt_logprobs(ids, choices[0].scored, vocabulary)
    return _to_json(fields)


def prompt_logprobs(
    token_ids: Sequence[int], scored: Iterable[TokenLogprobs], vocabulary: Vocabulary
) -> list[JSONValue]:
    """vLLM's form: for each token of a prompt, the first left out, token ids to what is known of
    them; null for the first."""
    told: list[JSONValue] = [None]
    for token_id, score in zip(token_ids[1:], scored, strict=True):
        entry: dict[str, JSONValue] = {}
        likeliest = zip(score.top_ids, score.top_logprobs, strict=True)
        for rank, (each, logprob) in enumerate(likeliest, 1):
            entry[str(each)] = _scored(each, logprob, rank, vocabulary)
        entry.setdefault(str(token_id), _scored(token_id, score.logprob, None, vocabulary))
        told.append(entry)
    return told


def _scored(
    token_id: int, logprob: float, rank: int | None, vocabulary: Vocabulary
) -> dict[str, JSONValue]:
    text = vocabulary.token_bytes(token_id).decode("utf-8", "replace")
    return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": text}


def _head(request: ChatRequest, card: ModelCard, kind: str) -> dict[str, object]:
    return answer_head(request.generation.id, kind, card, request.service_tier)


def answer_head(
    answer_id: str, kind: str, card: ModelCard, service_tier: str | None
) -> dict[str, object]:
    """What stands in the answer and in each of its chunks."""
    head: dict[str, object] = {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": card.id,
        "system_fingerprint": card.fingerprint,
    }
    if service_tier is not None:
        head["service_tier"] = service_tier
    return head


def _extras(request: ChatRequest, end: Completed) -> dict[str, object]:
    """What a choice has beyond OpenAI's fields, as vLLM names it."""
    extras: dict[str, object] = {}
    reason = stop_reason(request.generation.options, end)
    if reason is not None:
        extras["stop_reason"] = reason
    if request.return_token_ids:
        extras["token_ids"] = end.token_ids
    return extras


def stop_reason(options: GenerationOptions, end: Completed) -> str | int | None:
    """The stop string or stop token that ended a choice; None for the model's own end."""
    if end.stop is not None:
        return end.stop
    return end.stop_token_id if end.stop_token_id in options.stop_token_ids else None


def _message(answer: Answer) -> dict[str, JSONValue]:
    """Keys that say nothing are left out, as some clients take an empty list of calls amiss."""
    calls = answer.calls
    message: dict[str, JSONValue] = {
        "role": "assistant",
        "content": answer.text or (None if calls else ""),
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: ToolCall) -> dict[str, JSONValue]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_head(event: ToolCallStarted) -> dict[str, JSONValue]:
    return {"index": event.index, **_call(ToolCall(event.id, event.name, ""))}


def _finish_reason(end: Completed) -> str:
    if end.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if end.num_tool_calls else "stop"


def usage_fields(usage: Usage) -> dict[str, object]:
    fields: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }
    return fields if usage.cache is None else {**fields, "cache": usage.cache}


def _logprobs(tokens: Iterable[TokenText], vocabulary: Vocabulary) -> dict[str, object]:
    return {"content": shown_tokens(tokens, vocabulary), "refusal": None}

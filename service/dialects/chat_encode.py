"""OpenAI Chat Completions, the answer: events of the generation path to JSON and SSE frames."""

import time
from collections.abc import Iterable

import msgspec

from engine.text import Vocabulary
from engine.types import FinishReason
from service.conversation import JSONValue
from service.dialects import wire
from service.dialects.chat_decode import ChatRequest
from service.errors import from_failure
from service.events import Admitted, Completed, Event, Failed, TextDelta, TokenText, Usage
from service.model_card import ModelCard

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI shows this

_to_json = msgspec.json.encode


class ChatStream:
    """Encodes one streamed answer, each event to whole SSE frames.

    What is the same in every chunk of an answer is encoded once. Usage rides on the chunk with
    the finish reason, or, where `include_usage` asked for it, on a last chunk of its own.
    """

    def __init__(self, request: ChatRequest, card: ModelCard, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._include_usage = request.include_usage
        head = _to_json(
            {
                "id": request.generation.id,
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": card.id,
                "system_fingerprint": card.fingerprint,
            }
        )
        self._head = b"data: " + head[:-1]
        self._delta = self._head + b',"choices":[{"index":0,"delta":'
        self._content = self._delta + b'{"content":'

    def encode(self, event: Event) -> bytes:
        """The frames of an event."""
        match event:
            case Admitted():
                return self._chunk(b'{"role":"assistant","content":""}')
            case TextDelta():
                return self._text(event)
            case Completed():
                return self._end(event)
            case Failed():
                return b"data: " + wire.encode_error(from_failure(event)) + b"\n\n"

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: some clients time out between chunks, not bytes."""
        return self._chunk(b'{"content":""}')

    def _chunk(self, delta: bytes) -> bytes:
        return self._delta + delta + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def _text(self, event: TextDelta) -> bytes:
        text = _one_line(_to_json(event.text))
        logprobs = _to_json(_logprobs(event.tokens, self._vocabulary)) if event.tokens else b"null"
        return b"".join(
            (self._content, text, b'},"logprobs":', logprobs, b',"finish_reason":null}]}\n\n')
        )

    def _end(self, event: Completed) -> bytes:
        usage = b',"usage":' + _to_json(_usage(event.usage)) + b"}\n\n"
        reason = _to_json(_finish_reason(event))
        last = self._delta + b'{},"logprobs":null,"finish_reason":' + reason + b"}]"
        if self._include_usage:
            return last + b"}\n\n" + self._head + b',"choices":[]' + usage + DONE
        return last + usage + DONE


def encode_answer(
    request: ChatRequest,
    text: str,
    tokens: Iterable[TokenText],
    end: Completed,
    card: ModelCard,
    vocabulary: Vocabulary,
) -> bytes:
    """The unstreamed answer."""
    asked = request.generation.options.logprobs is not None
    return _to_json(
        {
            "id": request.generation.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": card.id,
            "system_fingerprint": card.fingerprint,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": _logprobs(tokens, vocabulary) if asked else None,
                    "finish_reason": _finish_reason(end),
                }
            ],
            "usage": _usage(end.usage),
        }
    )


def _finish_reason(end: Completed) -> str:
    return "length" if end.finish_reason is FinishReason.LENGTH else "stop"


def _usage(usage: Usage) -> dict[str, JSONValue]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _logprobs(tokens: Iterable[TokenText], vocabulary: Vocabulary) -> dict[str, JSONValue]:
    content: list[JSONValue] = [
        {
            **_token(token.token_id, token.logprobs.logprob, vocabulary),
            "top_logprobs": [
                _token(token_id, logprob, vocabulary)
                for token_id, logprob in zip(
                    token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True
                )
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, JSONValue]:
    data = vocabulary.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }


def _one_line(encoded: bytes) -> bytes:
    """JSON without the raw line ends that some clients split SSE at: U+0085, U+2028, U+2029."""
    if encoded.isascii():
        return encoded
    return (
        encoded.replace(b"\xc2\x85", b"\\u0085")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )

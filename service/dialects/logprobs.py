"""Log-probabilities of an answer's tokens, as OpenAI's dialects show them."""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from engine.text import Vocabulary
from service.events import TokenText

LEAST_LOGPROB: Final = -9999.0
"""JSON has no -inf; OpenAI shows this."""

ShownToken: TypeAlias = dict[str, Any]


def shown_tokens(tokens: Iterable[TokenText], vocabulary: Vocabulary) -> list[ShownToken]:
    """Each with its own bytes, and the likeliest at its place."""
    return [
        {
            **_shown(token.token_id, token.logprobs.logprob, vocabulary),
            "top_logprobs": [
                _shown(token_id, logprob, vocabulary)
                for token_id, logprob in zip(
                    token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True
                )
            ],
        }
        for token in tokens
    ]


def _shown(token_id: int, logprob: float, vocabulary: Vocabulary) -> ShownToken:
    data = vocabulary.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(data),
    }

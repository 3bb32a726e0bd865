"""The canonical answer: one typed stream of events that every dialect encodes.

Order: Admitted, TextDelta*, then exactly one of Completed or Failed. Usage, cache report and
finish reason are made once, here. Pieces of TextDelta joined are the unstreamed answer.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from engine.types import FinishReason, Phase, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` is a subset of `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenText:
    """One sampled token with its log-probabilities, for dialects that show them."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt is rendered, tokenised and accepted by the engine; nothing is generated yet."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of text, whole code points only; `tokens` is filled when logprobs were asked for."""

    text: str
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The generation ended by itself: STOP or LENGTH. `token_ids` are all sampled tokens."""

    finish_reason: FinishReason
    usage: Usage
    stop: str | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation ended otherwise (ERROR, ABORT, DEADLINE); `message` is safe to show."""

    finish_reason: FinishReason
    message: str
    usage: Usage | None = None
    retryable: bool = False


Event: TypeAlias = Admitted | TextDelta | Completed | Failed


@dataclass(slots=True)
class RequestRecord:
    """What one request's trace is built from: integers stamped on the way (monotonic ns).

    Filled by the generation path; handed to telemetry once, when the request has ended, on every
    path. `phases` begin with the edge's own (tokenize) and go on with the engine's.
    """

    operation: str
    model: str
    start_ns: int
    end_ns: int = 0
    first_token_ns: int = 0
    response_id: str = ""
    request_id: str = ""
    stream: bool = False
    options: dict[str, int | float | str] = field(default_factory=dict)
    traceparent: str | None = None
    tracestate: str | None = None
    conversation_id: str | None = None
    previous_response_id: str | None = None
    phases: list[Phase] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    error_type: str | None = None
    disconnected_ns: int = 0
    num_frames: int = 0
    num_bytes: int = 0

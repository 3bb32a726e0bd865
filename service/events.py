"""The canonical answer: one typed stream of events that every dialect encodes.

Order: Admitted; any mix of ReasoningDelta, TextDelta and tool calls (ToolCallStarted,
ToolCallDelta*, ToolCallDone, calls one after another); then exactly one of Completed or Failed.
Usage, cache report and finish reason are made once, here. Pieces of a kind joined are the
unstreamed answer.
"""

import random
import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from engine.types import (
    SHARED_TENANT,
    CacheReport,
    FinishReason,
    KeepPrefix,
    Phase,
    TokenLogprobs,
)
from service.cache.diagnosis import Diagnosis
from service.cache.report import CacheSummary
from service.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` is a subset of `prompt_tokens`, `reasoning_tokens` (thoughts with their end
    marker) of `output_tokens`; `cache` says more, where that was asked. Of the tokens of a
    prediction, those that were said in its place and the others."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cache: CacheSummary | None = None
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


def num_written(usage: Usage, kept: Sequence[KeepPrefix]) -> int:
    """Tokens up to the end of the longest of these prefixes that the cache had not."""
    ends = (usage.prompt_tokens if each.num_tokens < 0 else each.num_tokens for each in kept)
    return max(0, min(max(ends, default=0), usage.prompt_tokens) - usage.cached_tokens)


@dataclass(frozen=True, slots=True)
class TokenText:
    """One sampled token with its log-probabilities, for dialects that show them."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt is rendered, tokenised and accepted by the engine; nothing is generated yet.

    `token_ids` are the prompt's, as `engine.types.pack_tokens` makes them; `kept` are
    the prefixes that the client asks to keep. `diagnosis` compares the prompt with an
    earlier one, where the client names one.
    """

    prompt_tokens: int
    token_ids: bytes = field(default=b"", repr=False, compare=False)
    kept: tuple[KeepPrefix, ...] = ()
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's next tokens, from its second one on, without gaps; all
    are told before any text, where they were asked for."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of text, whole code points only; `tokens` is filled when logprobs were asked for."""

    text: str
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks before it answers, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A tool call begins; `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDone:
    """The call is complete; only complete calls make a finish reason of tool calls."""

    index: int


@dataclass(frozen=True, slots=True)
class Completed:
    """The generation ended by itself: STOP or LENGTH. `token_ids` are all sampled tokens.

    `num_tool_calls` counts the complete calls. `stop` or `stop_token_id` (else -1) is what the
    model said to end it.
    """

    finish_reason: FinishReason
    usage: Usage
    stop: str | None = None
    token_ids: tuple[int, ...] = ()
    num_tool_calls: int = 0
    stop_token_id: int = -1


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation ended otherwise (ERROR, ABORT, DEADLINE); `message` is safe to show."""

    finish_reason: FinishReason
    message: str
    usage: Usage | None = None
    retryable: bool = False


Event: TypeAlias = (
    Admitted
    | PromptScored
    | ReasoningDelta
    | TextDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallDone
    | Completed
    | Failed
)


@dataclass(slots=True)
class Content:
    """What was said: the prompt's messages, none where it was given as text or tokens, and the
    events of the answer so far."""

    conversation: Conversation
    events: list[Event] = field(default_factory=list)


_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


def new_trace_number() -> int:
    """A trace id, as an integer, for what no caller began."""
    return random.getrandbits(128) | 1


def trace_id_of(traceparent: str | None, number: int) -> str:
    """32 hexadecimal digits: the caller's, where it brought a valid trace, else the number's."""
    given = _TRACEPARENT.fullmatch(traceparent or "")
    return given[1] if given and int(given[1], 16) else f"{number:032x}"


@dataclass(slots=True)
class RequestRecord:
    """What one request's trace is built from: integers stamped on the way (monotonic ns).

    Filled by the generation path; handed to telemetry once, when the request has ended, on every
    path. `phases` follow one another without a gap from `start_ns` on: the edge's own, the
    engine's, and what was left to do. `token_ns` are the times at which the engine told tokens, a
    step's together. `choice` numbers the generations of one request, of which there are
    `num_choices`, told apart from other requests' by `group`; `num_per_prompt` in a row share a
    prompt. `donor` is the response that
    computed what was taken from the cache, `content` is None unless it is to be captured, and
    `connection_traceparent` what the connection began
    with, where the message said another.
    """

    operation: str
    model: str
    start_ns: int
    end_ns: int = 0
    response_id: str = ""
    request_id: str = ""
    path: str = ""
    tenant: str = SHARED_TENANT
    stream: bool = False
    options: dict[str, int | float | str | list[str]] = field(default_factory=dict)
    traceparent: str | None = None
    tracestate: str | None = None
    conversation_id: str | None = None
    previous_response_id: str | None = None
    connection_traceparent: str | None = None
    donor: str = ""
    phases: list[Phase] = field(default_factory=list)
    usage: Usage | None = None
    cache: CacheReport | None = None
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_replayed_tokens: int = 0
    error_type: str | None = None
    error_param: str | None = None
    disconnected_ns: int = 0
    num_frames: int = 0
    num_bytes: int = 0
    choice: int = 0
    num_choices: int = 1
    num_per_prompt: int = 1
    group: str = ""
    content: Content | None = None
    token_ns: "array[int]" = field(default_factory=lambda: array("q"))
    trace_number: int = field(default_factory=new_trace_number)
    """Names the trace where the caller brought none."""
    rest: str = "edge"
    """What the phase is called that lasts from the last known one to the end."""

    def stamp(self, name: str, *, num_tokens: int = 0) -> None:
        """End the current phase of the edge now, as `name`."""
        self._add(Phase(name, 0, time.monotonic_ns(), num_tokens))

    def take_engine_phases(self, phases: tuple[Phase, ...]) -> None:
        """What the engine stamped; the way to it is a phase too."""
        if phases:
            self._add(Phase("dispatch", 0, phases[0].start_ns))
            for phase in phases:
                self._add(phase)
            self.rest = "stream"

    def close(self, end_ns: int) -> None:
        """The request has ended: the last phase lasts until then."""
        self.end_ns = end_ns
        self._add(Phase(self.rest, 0, end_ns))

    def _add(self, phase: Phase) -> None:
        start_ns = self.phases[-1].end_ns if self.phases else self.start_ns
        end_ns = max(start_ns, phase.end_ns)
        if end_ns > start_ns or phase.name != self.rest:
            self.phases.append(msgspec.structs.replace(phase, start_ns=start_ns, end_ns=end_ns))

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits: the caller's, where it brought a trace."""
        return trace_id_of(self.traceparent, self.trace_number)

    @property
    def first_token_ns(self) -> int:
        """When the first token was made; 0 if none was."""
        return self.token_ns[0] if self.token_ns else 0

    @property
    def succeeded(self) -> bool:
        """Whether the answer was made to its end."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def total_usage(choices: Sequence[RequestRecord]) -> Usage | None:
    """What a request used: every prompt once, with what its first choice took from the cache, and
    every choice's output. None where the engine took none of it."""
    served = [each.usage for each in choices if each.usage is not None]
    if not served:
        return None
    first = [each.usage for each in choices[:: choices[0].num_per_prompt] if each.usage]
    return Usage(
        sum(each.prompt_tokens for each in first),
        sum(each.cached_tokens for each in first),
        sum(each.output_tokens for each in served),
    )

"""The form of a workload file (TOML): parts that run side by side, each with its arrivals."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from loadtest.arrival import Arrival, Positive

# No Meta here: msgspec 0.23 reads past its own memory for a constrained number or a pair.
Length: TypeAlias = int | tuple[int, int]
Seconds: TypeAlias = float | tuple[float, float]
Many: TypeAlias = Annotated[int, Meta(ge=0)]


class Conversations(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="conversations", tag_field="kind"
):
    """Made-up conversations. A pair `[low, high]` is drawn evenly for each use.

    `groups` share a system prompt of about `system_tokens` and `tools` specs of about
    `tool_tokens` each, written into the prompt or given in the request's field (`tools_as`).
    Each turn appends `user_tokens` and, with `documents` in the pool, `documents_each` of them
    (popular ones more often). `wait_s` passes before each turn but the first. Each session
    splits into `forks` more after `fork_after` turns, which then say `turns - fork_after` of
    their own.
    """

    name: str
    arrival: Arrival
    user_tokens: Length
    output_tokens: Length
    groups: Many = 0
    system_tokens: Many = 40
    tools: Many = 0
    tool_tokens: Many = 110
    tools_as: Literal["text", "field"] = "text"
    documents: Many = 0
    document_tokens: Length = 0
    documents_each: Many = 1
    turns: Length = 1
    wait_s: Seconds = 0.0
    forks: Many = 0
    fork_after: Many = 1


class Replay(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="replay", tag_field="kind"
):
    """A recorded trace (`format`), read from `trace` or the command line's --trace.

    All lengths are divided by `scale`, tool waits by `speed`; prefix structure and order stay.
    The first `limit` requests (mooncake) or sessions (tracelab) are used, and at most
    `max_turns` rounds of a session.
    """

    name: str
    arrival: Arrival
    format: Literal["mooncake", "tracelab"]
    trace: str = ""
    scale: Positive = 1.0
    speed: Positive = 1.0
    limit: Annotated[int, Meta(ge=1)] = 1000
    max_turns: Annotated[int, Meta(ge=1)] = 1000


Part: TypeAlias = Conversations | Replay


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a request must keep to count for goodput, in milliseconds; None asks nothing."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    itl_max_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload file. `shows` are the figures that a table of several reports has of it."""

    description: str
    parts: Annotated[tuple[Part, ...], Meta(min_length=1)]
    slo: Slo = Slo()
    shows: tuple[str, ...] = ()

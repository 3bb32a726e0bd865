"""Recorded traces: who arrives when, how long, and which prefixes are the same.

Mooncake (FAST'25 trace release): one JSON object a line with `timestamp` in ms, `input_length`,
`output_length` and `hash_ids`, one id for each 512 tokens of prompt; equal ids, equal tokens.
TraceLab: one JSON object for each round of a coding agent's session, with `input_tokens_total`,
`prefix_tokens` (read from a cache), `output_tokens` and its tool calls' wall times.
Neither holds any text: it is made from the ids.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec

from loadtest import arrival
from loadtest.arrival import Arrival
from loadtest.plan import Session, Turn
from loadtest.workloads.spec import Replay
from loadtest.workloads.text import words

MOONCAKE_PAGE_TOKENS = 512
PUBLIC_TRACES = {
    "mooncake": "FAST25-release/traces/conversation_trace.jsonl of "
    "https://github.com/kvcache-ai/Mooncake",
    "tracelab": "example_sessions/derived/round_trace.jsonl of https://github.com/uw-syfi/TraceLab",
}
"""Where traces are had, by format."""


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TracelabTool(msgspec.Struct, frozen=True):
    """A tool call of a round; None where the trace does not know its time."""

    tool_wall_latency_ms: float | None = None


class TracelabEvent(msgspec.Struct, frozen=True):
    """When something of a round happened."""

    timestamp: datetime


class TracelabRound(msgspec.Struct, frozen=True):
    """A line of a TraceLab round trace."""

    session_id: str
    round_index: int
    input_tokens_total: int
    prefix_tokens: int
    output_tokens: int
    provider: str = ""
    timing_events: list[TracelabEvent] = []
    tools: list[TracelabTool] = []


def replay(part: Replay, when: Arrival, seed: str) -> list[Session]:
    """The sessions of a trace. Raises OSError, ValueError or MsgspecError for a trace that cannot
    be read. A closed or Poisson arrival takes the trace's sessions in order; when it needs more,
    it begins again with new text, so that no answer is cached that was not in the trace."""
    if not part.trace:
        raise ValueError(
            f"a replay needs a recorded trace, --trace FILE; one of this format is "
            f"{PUBLIC_TRACES[part.format]}"
        )
    if isinstance(when, arrival.Burst | arrival.Beside):
        raise ValueError("a replay's arrivals are recorded, closed or poisson")
    read = _mooncake if part.format == "mooncake" else _tracelab
    recorded = list(read(part, seed, 0))
    if not recorded:
        raise ValueError("the trace is empty")
    times_s = [time_s for time_s, _ in recorded]
    count = arrival.num_sessions(when, len(recorded))
    for lap in range(1, math.ceil(count / len(recorded))):
        recorded += read(part, seed, lap)
    starts = arrival.start_times(when, count, times_s, random.Random(f"{seed}/arrival"))
    return [
        replace(session, id=str(index), start_s=start_s)
        for index, ((_, session), start_s) in enumerate(zip(recorded, starts, strict=False))
    ]


def _mooncake(part: Replay, seed: str, lap: int) -> Iterator[tuple[float, Session]]:
    """Each request by itself: its prompt is the text of its ids one after another."""
    page_tokens = max(round(MOONCAKE_PAGE_TOKENS / part.scale), 1)
    with Path(part.trace).open("rb") as lines:
        for line in islice(lines, part.limit):
            request = msgspec.json.decode(line, type=MooncakeRequest)
            num_tokens = max(round(request.input_length / part.scale), 1)
            text = []
            for page in request.hash_ids:
                length = min(page_tokens, num_tokens)
                text.append(words(page_tokens, seed, lap, page).split(" ")[:length])
                num_tokens -= length
            prompt = " ".join(word for page_words in text for word in page_words)
            turn = Turn(prompt, max(round(request.output_length / part.scale), 1))
            yield request.timestamp / 1e3, Session("", "", (turn,))


def _tracelab(part: Replay, seed: str, lap: int) -> Iterator[tuple[float, Session]]:
    """A session for each run of rounds whose context grows; a context that shrinks (the agent
    compacted it) begins a new one. What a session's first round reads from the cache is a system
    prompt that all agents of its provider share. A round's new text is what its prompt has more
    than the conversation before it, answers included, and it waits for the slowest tool of the
    round before."""
    data = Path(part.trace).read_bytes()
    rounds = [msgspec.json.decode(line, type=TracelabRound) for line in data.splitlines() if line]
    by_session: dict[str, list[TracelabRound]] = {}
    for one in rounds:
        by_session.setdefault(one.session_id, []).append(one)
    sessions: list[tuple[float, Session]] = []
    for name, own in by_session.items():
        own.sort(key=lambda one: one.round_index)
        for chunk in _growing(own):
            first = chunk[0]
            key = f"{seed}/{lap}/{name}/{first.round_index}"
            turns = _turns(chunk[: part.max_turns], part, key)
            system = words(round(first.prefix_tokens / part.scale), seed, "system", first.provider)
            begins = [event.timestamp.timestamp() for event in first.timing_events[:1]]
            sessions.append((begins[0] if begins else 0.0, Session("", system, turns)))
    yield from sorted(sessions, key=lambda pair: pair[0])[: part.limit]


def _growing(rounds: list[TracelabRound]) -> Iterator[list[TracelabRound]]:
    chunk: list[TracelabRound] = []
    for one in rounds:
        if chunk and one.input_tokens_total < chunk[-1].input_tokens_total:
            yield chunk
            chunk = []
        chunk.append(one)
    yield chunk


def _turns(rounds: list[TracelabRound], part: Replay, key: str) -> tuple[Turn, ...]:
    """Agents drop parts of an answer, its reasoning above all, and the replay cannot: where that
    makes its context longer than the recorded one, later turns say less."""
    turns = []
    context = round(rounds[0].prefix_tokens / part.scale)
    wait_s = 0.0
    for one in rounds:
        new_tokens = max(round(one.input_tokens_total / part.scale) - context, 1)
        max_tokens = max(round(one.output_tokens / part.scale), 1)
        turns.append(Turn(words(new_tokens, key, one.round_index), max_tokens, wait_s))
        context += new_tokens + max_tokens
        waits_ms = [tool.tool_wall_latency_ms or 0.0 for tool in one.tools]
        wait_s = max(waits_ms, default=0.0) / 1e3 / part.speed
    return tuple(turns)

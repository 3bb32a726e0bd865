"""Made-up conversations: agents, chats, questions about documents."""

import random

from loadtest import arrival
from loadtest.arrival import Arrival
from loadtest.plan import Session, Turn
from loadtest.workloads.spec import Conversations, Length, Seconds
from loadtest.workloads.text import system_prompt, tool_spec, words


def conversations(part: Conversations, when: Arrival, seed: str) -> list[Session]:
    """The sessions of a part, in the order of their arrival. Raises ValueError for a part that
    makes no sense."""
    if isinstance(when, arrival.Recorded):
        raise ValueError("made-up conversations have no recorded arrivals")
    count = arrival.num_sessions(when, 0)
    times = arrival.start_times(when, count, (), random.Random(f"{seed}/arrival"))
    starts = [_group(part, f"{seed}/group-{group}") for group in range(part.groups or count)]
    sessions = []
    for index, start_s in enumerate(times):
        key = f"{seed}/session-{index}"
        system, tools = starts[index % len(starts)]
        rng = random.Random(key)
        turns = tuple(
            _turn(part, turn, key, rng, seed) for turn in range(max(_draw(part.turns, rng), 1))
        )
        forks = tuple(
            Session(
                id=f"{index}.{fork}",
                system=system,
                turns=tuple(
                    _turn(part, turn, f"{key}/fork-{fork}", rng, seed)
                    for turn in range(part.fork_after, len(turns))
                ),
                tools=tools,
            )
            for fork in range(part.forks)
            if part.fork_after < len(turns)
        )
        sessions.append(Session(str(index), system, turns, start_s, tools, part.fork_after, forks))
    return sessions


def _group(part: Conversations, key: str) -> tuple[str, tuple[dict[str, object], ...]]:
    specs = [tool_spec(part.tool_tokens, key, "tool", index) for index in range(part.tools)]
    if part.tools_as == "text":
        return system_prompt(part.system_tokens, specs, key), ()
    return system_prompt(part.system_tokens, [], key), tuple(specs)


def _turn(part: Conversations, turn: int, key: str, rng: random.Random, seed: str) -> Turn:
    asked = words(_draw(part.user_tokens, rng), key, "user", turn)
    found = []
    for _ in range(part.documents_each if part.documents else 0):
        # The k-th document is asked for about twice as often as the 2k-th.
        weights = [1 / rank for rank in range(1, part.documents + 1)]
        document = rng.choices(range(part.documents), weights)[0]
        length = _draw(part.document_tokens, random.Random(f"{seed}/{document}"))
        found.append(f"Document {document}: {words(length, seed, 'document', document)}")
    return Turn(
        text="\n".join([*found, asked]),
        max_tokens=max(_draw(part.output_tokens, rng), 1),
        wait_s=_seconds(part.wait_s, rng) if turn else 0.0,
    )


def _draw(length: Length, rng: random.Random) -> int:
    return max(length if isinstance(length, int) else rng.randint(*length), 0)


def _seconds(wait_s: Seconds, rng: random.Random) -> float:
    return max(rng.uniform(*wait_s) if isinstance(wait_s, tuple) else wait_s, 0.0)

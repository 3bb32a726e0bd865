"""What will be sent: sessions of turns, fixed before the first byte leaves."""

from dataclasses import dataclass
from typing import Any

from loadtest.arrival import Beside


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: `text` joins the conversation `wait_s` after the last answer.

    `wait_s` stands for a tool that runs or a person who reads. `max_tokens` bounds the answer.
    """

    text: str
    max_tokens: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. Its turns follow each other; the answers come from the server.

    `start_s` is the arrival after the start of the run in an open loop, None where a worker of a
    closed loop takes the session up. `forks` begin with this conversation as it is after
    `fork_after` turns, at once and side by side. `tools` are JSON schemas for the request's own
    field; specs written into `system` are text.
    """

    id: str
    system: str
    turns: tuple[Turn, ...]
    start_s: float | None = None
    tools: tuple[dict[str, Any], ...] = ()
    fork_after: int = 0
    forks: tuple["Session", ...] = ()

    @property
    def num_turns(self) -> int:
        """Requests of the session and its forks."""
        return len(self.turns) + sum(fork.num_turns for fork in self.forks)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Sessions of one kind. `concurrency` workers take them in turn (closed loop), or each starts
    at its own time whatever the server does (`concurrency` None, open loop), or each has its turn
    beside the streams of others (`beside`)."""

    name: str
    sessions: tuple[Session, ...]
    concurrency: int | None
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one run sends; the same for the same workload, seed and level."""

    parts: tuple[PartPlan, ...]

    @property
    def num_turns(self) -> int:
        """Requests of the run."""
        return sum(session.num_turns for part in self.parts for session in part.sessions)

    def systems(self) -> list[Session]:
        """One session for each distinct start of a prompt, in order."""
        seen = {
            (session.system, str(session.tools)): session
            for part in reversed(self.parts)
            for session in reversed(part.sessions)
        }
        return list(reversed(seen.values()))

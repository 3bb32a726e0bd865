"""What one request showed."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

SPARE_TOKENS = 8
# A chat template and its default system prompt.
SPARE_PROMPT_TOKENS = 1000
# A character of several tokens is one piece, and a token of several characters may come as a few.
MAX_PIECES_PER_TOKEN = 4


class Kind(StrEnum):
    """Why a request failed. Each is told apart in the report."""

    CONNECT = "connect"
    RATE_LIMITED = "http_429"
    OVERLOADED = "http_503"
    REFUSED = "http_4xx"
    BROKEN = "http_5xx"
    STALLED = "stalled"
    CUT = "cut"
    ENDLESS = "endless"
    REPORTED = "server_error"
    PROTOCOL = "protocol"


class Role(StrEnum):
    """What a request is there for. A probe's effect on the streams beside it is measured, and
    theirs on it."""

    ORDINARY = "ordinary"
    PROBE_ALONE = "probe_alone"
    PROBE_BESIDE = "probe_beside"


class RequestError(Exception):
    """A request that failed, as a transport tells it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def of_status(status: int, body: str) -> RequestError:
    """The error of an HTTP answer that isn't a success."""
    kind = Kind.BROKEN if status >= 500 else Kind.REFUSED
    if status == 429:
        kind = Kind.RATE_LIMITED
    elif status in (503, 529):
        kind = Kind.OVERLOADED
    return RequestError(kind, f"HTTP {status}: {body[:200]}")


@dataclass(slots=True)
class Usage:
    """Tokens as the server counts them. `cached` is a part of `prompt`, `hidden` of `output`."""

    prompt: int
    output: int
    cached: int = 0
    hidden: int = 0


@dataclass(slots=True)
class Sample:
    """One request. Times in seconds of `time.perf_counter`, 0.0 for what did not happen.

    `due_s` is when the workload wanted the request sent: latencies count from there, so that a
    late client or a full connection pool shows as latency and not as fewer requests (no
    coordinated omission). `piece_s` are the times at which pieces of answer came off the socket;
    a piece is one event with text, or the whole answer where nothing is streamed. `bytes_up` and
    `bytes_down` are of bodies and frames, without headers. `prompt_bytes` are those of the whole
    conversation, also of what the server already had.
    """

    session: str
    part: str
    turn: int
    max_tokens: int
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    streamed: bool = True
    piece_s: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: Usage | None = None
    response_id: str | None = None
    finished: bool = False
    bytes_up: int = 0
    bytes_down: int = 0
    error: Kind | None = None
    message: str = ""
    interrupted: bool = False
    prompt_bytes: int | None = None
    role: Role = Role.ORDINARY

    @property
    def good(self) -> bool:
        """The request ran to its end and nothing was wrong."""
        return self.error is None and not self.interrupted

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float:
        """From when it was due to the first piece."""
        return self.piece_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """From when it was due to the end."""
        return self.end_s - self.due_s

    @property
    def believed(self) -> Usage | None:
        """The server's counts; None where there are none or they cannot be true."""
        return None if self.findings() else self.usage

    @property
    def output_tokens(self) -> int:
        """As the server counts them, or pieces where it doesn't or cannot be believed."""
        usage = self.believed
        return len(self.pieces) if usage is None else usage.output

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None without a second."""
        if not self.streamed or len(self.piece_s) < 2 or self.output_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.output_tokens - 1)

    def add(self, text: str, now_s: float) -> None:
        """A piece of the answer that came off the socket at `now_s`; nothing for an empty one.
        Raises RequestError for an answer that will not end."""
        if text:
            self.pieces.append(text)
            self.piece_s.append(now_s)
            if len(self.pieces) > MAX_PIECES_PER_TOKEN * self.max_tokens + SPARE_TOKENS:
                raise RequestError(
                    Kind.ENDLESS,
                    f"{len(self.pieces)} pieces came where {self.max_tokens} tokens were allowed",
                )

    def begin(self, num_bytes: int) -> None:
        """The request leaves now."""
        self.sent_s = time.perf_counter()
        self.bytes_up += num_bytes

    def findings(self) -> list[str]:
        """What about the server's usage cannot be true, or is missing, in fixed words."""
        if not self.good or not self.finished:
            return []
        usage = self.usage
        if usage is None:
            return ["no usage reported"]
        found = []
        if self.streamed and usage.output < len(self.pieces):
            found.append("fewer output tokens claimed than pieces of text sent")
        if usage.output > self.max_tokens:
            found.append("more output tokens claimed than were allowed")
        visible = usage.output - usage.hidden
        # A token that ends the answer or is part of a character has no text of its own.
        if visible > len(self.text.encode()) + SPARE_TOKENS:
            found.append("more output tokens claimed than the answer has bytes")
        if usage.cached > usage.prompt:
            found.append("more cached tokens claimed than prompt tokens")
        if self.prompt_bytes is not None and usage.prompt > self.prompt_bytes + SPARE_PROMPT_TOKENS:
            found.append("more prompt tokens claimed than the conversation has bytes")
        if min(usage.prompt, usage.output, usage.cached) < 0:
            found.append("a count below zero claimed")
        return found

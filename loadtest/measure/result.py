"""The report's data, as its JSON has it: complete enough to draw every plot again."""

from typing import Literal

import msgspec

from loadtest.measure.client import ClientLoad
from loadtest.workloads.spec import Slo, Workload

FORMAT = "loadtest/1"


class Level(msgspec.Struct, frozen=True, order=True):
    """A point of a sweep. `value` 0 is the workload as it is written."""

    kind: Literal["concurrency", "rate_per_s", "as_written"]
    value: float

    def __str__(self) -> str:
        return {
            "concurrency": f"{self.value:g} at once",
            "rate_per_s": f"{self.value:g}/s",
            "as_written": "as written",
        }[self.kind]


class TurnFigures(msgspec.Struct, frozen=True):
    """All requests of one turn index."""

    turn: int
    num_requests: int
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_max_ms: float | None
    itl_p50_ms: float | None
    prompt_tokens: float
    cached_share: float | None


class Stream(msgspec.Struct, frozen=True):
    """One request on the run's time axis, in ms since its start. `gaps_ms` are between pieces,
    the first after `first_ms`; None for what did not happen."""

    session: str
    turn: int
    due_ms: float
    first_ms: float | None
    end_ms: float
    gaps_ms: list[float]
    error: str | None


class Run(msgspec.Struct, frozen=True):
    """One run of one target at one level. `figures` has the names that --assert takes; a figure
    that has no data is missing. `histograms` are HDR V2 text in microseconds."""

    target: str
    level: Level
    repeat: int
    wall_s: float
    interrupted: bool
    figures: dict[str, float]
    histograms: dict[str, str]
    turns: list[TurnFigures]
    hits: list[tuple[float, float]]
    streams: list[Stream]
    errors: dict[str, int]
    error_examples: dict[str, str]
    findings: dict[str, int]
    num_skipped: int
    client: ClientLoad


class Ratio(msgspec.Struct, frozen=True):
    """A figure of `target` over that of `baseline`, from paired repeats: geometric mean, and the
    95 per cent interval of Student's t on its logarithm (None from a single repeat)."""

    level: Level
    figure: str
    baseline: str
    target: str
    num_pairs: int
    ratio: float
    low: float | None
    high: float | None


class Verdict(msgspec.Struct, frozen=True):
    """What became of an --assert expression at one level of one target; None is no data."""

    expression: str
    target: str
    level: Level
    value: float | None
    holds: bool


class Machine(msgspec.Struct, frozen=True):
    """Where the client ran; the servers too, where their address is this machine's own."""

    cpu: str
    cores: int
    memory_gib: float
    system: str


class TargetInfo(msgspec.Struct, frozen=True):
    """A server under load. `dead` says why it took no part."""

    name: str
    url: str
    model: str
    dead: str | None = None


class Report(msgspec.Struct, frozen=True):
    """Everything."""

    format: str
    made: str
    machine: Machine
    workload_name: str
    workload: Workload
    transport: str
    seed: str
    warm: bool
    slo: Slo
    targets: list[TargetInfo]
    runs: list[Run]
    ratios: list[Ratio] = []
    verdicts: list[Verdict] = []
    interrupted: bool = False
    note: str = ""

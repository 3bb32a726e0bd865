"""When sessions begin: when a worker is free (closed loop), at a fixed time (open loop), or when
the streams of others run."""

import random
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

Positive: TypeAlias = Annotated[float, Meta(gt=0.0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]


class Closed(msgspec.Struct, frozen=True, tag="closed", tag_field="kind"):
    """`concurrency` workers, each takes the next session when its last is over, `sessions_each`
    times on average. Load adapts to the server: throughput is what it shows, not queueing."""

    concurrency: Count
    sessions_each: Count = 1


class Poisson(msgspec.Struct, frozen=True, tag="poisson", tag_field="kind"):
    """`sessions` independent arrivals at `rate_per_s`: users who do not know of each other."""

    rate_per_s: Positive
    sessions: Count


class Burst(msgspec.Struct, frozen=True, tag="burst", tag_field="kind"):
    """`size` sessions at the same moment, every `every_s` seconds, `bursts` times."""

    size: Count
    every_s: Positive
    bursts: Count


class Beside(msgspec.Struct, frozen=True, tag="beside", tag_field="kind"):
    """One session at a time beside the closed parts, to see what it does to their streams and
    they to it. First `alone` of them with nothing beside, for a speed to compare with. Then
    `times`, each when every worker of the closed parts has had its first token and `pause_s` went
    by in peace. The closed parts begin no more sessions once the last of these is over."""

    times: Count
    alone: Count = 1
    pause_s: Positive = 1.0


class Recorded(msgspec.Struct, frozen=True, tag="recorded", tag_field="kind"):
    """The times of a trace, `speed` times as fast; the first session begins at 0."""

    speed: Positive = 1.0


Arrival: TypeAlias = Closed | Poisson | Burst | Beside | Recorded


def num_sessions(arrival: Arrival, num_recorded: int) -> int:
    """How many sessions the arrival asks for; `num_recorded` are there in a trace."""
    match arrival:
        case Closed(concurrency, sessions_each):
            return concurrency * sessions_each
        case Poisson(_, sessions):
            return sessions
        case Burst(size, _, bursts):
            return size * bursts
        case Beside(times, alone, _):
            return alone + times
        case Recorded():
            return num_recorded


def start_times(
    arrival: Arrival, count: int, recorded_s: Sequence[float], rng: random.Random
) -> list[float | None]:
    """The start of each of `count` sessions in seconds, None where it waits for
    others. `recorded_s` are the times of a trace, needed for `Recorded` alone."""
    match arrival:
        case Closed() | Beside():
            return [None] * count
        case Burst(size, every_s, _):
            return [index // size * every_s for index in range(count)]
        case Recorded(speed):
            first_s = recorded_s[0] if recorded_s else 0.0
            return [(time_s - first_s) / speed for time_s in recorded_s[:count]]
        case Poisson(rate_per_s, _):
            times: list[float | None] = []
            now_s = 0.0
            for _ in range(count):
                now_s += rng.expovariate(rate_per_s)
                times.append(now_s)
            return times


def at_level(arrival: Arrival, concurrency: int | None, rate_per_s: float | None) -> Arrival:
    """The arrival of a sweep's point: other concurrency for a closed loop, other rate for
    Poisson, and anything else unchanged."""
    if isinstance(arrival, Closed) and concurrency is not None:
        return msgspec.structs.replace(arrival, concurrency=concurrency)
    if isinstance(arrival, Poisson) and rate_per_s is not None:
        return msgspec.structs.replace(arrival, rate_per_s=rate_per_s)
    return arrival

"""What the engine tells of itself: counts, the present state, and the work of its steps."""

from collections.abc import Sequence

import msgspec

from engine.types import Verdict, judge


class StepWork(msgspec.Struct, frozen=True, array_like=True):
    """What steps did, one or many of a `kind`: "decode" (a token each), "prefill" (prompts alone),
    or "mixed". Times as in `Phase`; `wall_ns` is from one step's end to the next one's."""

    kind: str
    num_steps: int = 0
    num_tokens: int = 0
    wall_ns: int = 0
    kernel_ns: int = 0
    memory_ns: int = 0
    compute_ns: int = 0
    flops: int = 0
    memory_bytes: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """All but the kind."""
        return (
            self.num_steps,
            self.num_tokens,
            self.wall_ns,
            self.kernel_ns,
            self.memory_ns,
            self.compute_ns,
            self.flops,
            self.memory_bytes,
        )

    @property
    def intensity(self) -> float:
        """Operations per byte of memory traffic."""
        return self.flops / self.memory_bytes if self.memory_bytes else 0.0

    @property
    def mbu(self) -> float:
        """Share of the machine's memory bandwidth that was used, over the wall time."""
        return self.memory_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def mfu(self) -> float:
        """Share of the machine's operations that were used, over the wall time."""
        return self.compute_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def host_share(self) -> float:
        """Share of the wall time in which no kernel ran."""
        return max(0, self.wall_ns - self.kernel_ns) / self.wall_ns if self.wall_ns else 0.0

    @property
    def verdict(self) -> Verdict:
        return judge(self.wall_ns, self.kernel_ns, self.memory_ns, self.compute_ns)


def sum_work(steps: Sequence[StepWork]) -> StepWork:
    """Of steps of one kind, at least one."""
    totals = [sum(column) for column in zip(*(step.numbers for step in steps), strict=True)]
    return StepWork(steps[0].kind, *totals)


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """Pages by state; each page is in exactly one, so they sum to `total`."""

    total: int
    free: int
    cached: int
    referenced: int
    pinned: int


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a request that comes now has to reckon with; a rate of 0 is not known yet.

    Prompts are computed at `prefill_tokens_per_s` while more of them wait than a step takes, and
    `computed_share` of their tokens have to be: the rest is cached. `prefill_tokens` are left of
    prompts that run. `free_places` more requests may run; `place_waits_s` tells when each of the
    running ones is expected to end, in rising order, and `life_s` how long one more would run.
    """

    prefill_tokens_per_s: float = 0.0
    computed_share: float = 1.0
    prefill_tokens: int = 0
    free_places: int = 1
    place_waits_s: tuple[float, ...] = ()
    life_s: float = 0.0


class SchedulingStats(msgspec.Struct, frozen=True, kw_only=True):
    """How the promises are kept. `itl_target_ms`, `ttft_target_ms`: 0 for none; `itl_p50_ms` and
    `itl_p95_ms`: of the last steps of running streams; `chunk_p50_tokens`: of the last chunks of
    prompts. `step_error`: the usual difference of a step's time from what was predicted, relative.
    `oldest_waiting_ms`: how long the first of those that wait has been there; `waiting_tokens`:
    of all their prompts. `num_floor_steps`: steps that took longer than the target on purpose, for
    prompts that the streams left no room."""

    itl_target_ms: float = 0.0
    ttft_target_ms: float = 0.0
    itl_p50_ms: float = 0.0
    itl_p95_ms: float = 0.0
    chunk_p50_tokens: int = 0
    step_error: float = 0.0
    oldest_waiting_ms: float = 0.0
    waiting_tokens: int = 0
    num_floor_steps: int = 0
    load: EngineLoad = EngineLoad()


class LeaseStats(msgspec.Struct, frozen=True, array_like=True):
    """The leases that hold now: the pages they hold, each once, and of how many tenants."""

    num_leases: int = 0
    num_pages: int = 0
    num_tenants: int = 0


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """A histogram of integers: `counts[i]` samples are at most `bounds[i]` and above the bound
    before it, the last count is of those above all bounds. `total` is the sum of the samples."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start (`num_`), and the present state.

    `paused` of the running ones want for credit. `num_queried_tokens` are the prompt tokens of
    admitted requests, which the cache was asked for. `evicted_pages` by reason: "room" was needed,
    or "flush". `step_ns`: durations of steps, their share of the loop included; `step_tokens` and
    `chunk_tokens`: tokens computed per step, and per prefill chunk. `work` is the sum over all
    steps of a kind, `recent_steps` the last ones, oldest first; the peaks are what the machine is
    known to do by now, 0 where it was not measured. `num_restored_pages` came back from disk;
    `num_damaged_pages` did not, as they were not what was written. Of the output tokens,
    `num_forced_tokens` needed no step: their grammars left no choice. `num_drafts` times a request
    had tokens computed because they might come next, `num_draft_tokens` of them, and
    `num_accepted_tokens` did come; `step_tokens` and `work` count them all, `num_computed_tokens`
    those that stay.
    """

    pool: PoolStats
    running: int
    waiting: int
    paused: int
    step_ns: Distribution
    step_tokens: Distribution
    chunk_tokens: Distribution
    evicted_pages: dict[str, int]
    work: tuple[StepWork, ...]
    recent_steps: tuple[StepWork, ...]
    num_queried_tokens: int
    num_steps: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    peak_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0
    num_forced_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_disk_pages: int = 0
    num_restored_pages: int = 0
    num_damaged_pages: int = 0
    num_audits: int = 0
    num_audit_differences: int = 0
    num_quarantined_pages: int = 0
    leases: LeaseStats = LeaseStats()
    scheduling: SchedulingStats = SchedulingStats()

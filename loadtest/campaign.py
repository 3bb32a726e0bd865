"""All runs of a report: each level, each repeat, each target, in alternation."""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import PurePath

from loadtest.measure.progress import Progress
from loadtest.measure.result import Level, Run, TargetInfo
from loadtest.measure.sample import RequestError
from loadtest.measure.summary import summarise
from loadtest.plan import Plan
from loadtest.run import find_model, run_plan, unless_stopped, warm_up
from loadtest.transports import Target, Transport, open_transport
from loadtest.workloads import Slo, Workload, build_plan

Watch = Callable[[Target, Level, int, Progress], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to run. `warm` fills prefix caches before each run is measured. Targets whose `model`
    is empty are asked for it."""

    workload: Workload
    transport: str
    targets: tuple[Target, ...]
    levels: tuple[Level, ...]
    repeats: int
    seed: str
    slo: Slo
    warm: bool = False


@dataclass(slots=True)
class Outcome:
    """What is known so far; complete and true at any moment."""

    targets: list[TargetInfo]
    runs: list[Run]
    interrupted: bool = False


async def run_campaign(
    campaign: Campaign, outcome: Outcome, watch: Watch, stop: asyncio.Event
) -> None:
    """Run it all into `outcome`; returns early when `stop` is set.

    The targets of one repeat follow each other with the same requests, and take turns at being
    first, so that a machine that drifts is as unfair to each. A target that does not answer is
    noted as dead and takes no part; the others go on. Raises WorkloadError.
    """
    alive: list[tuple[Target, Transport]] = []
    try:
        for target in campaign.targets:
            answer = await unless_stopped(_greet(target, outcome), stop)
            if answer is not None:
                alive.append((answer, open_transport(campaign.transport, answer)))
        for level in campaign.levels:
            for repeat in range(campaign.repeats):
                first = repeat % max(len(alive), 1)
                for target, transport in alive[first:] + alive[:first]:
                    plan = _plan(campaign, level, repeat)
                    progress = Progress(plan.num_turns)
                    await unless_stopped(_warm_up(transport, plan, campaign.warm), stop)
                    if stop.is_set():
                        return
                    async with watch(target, level, repeat, progress):
                        await run_plan(plan, transport, progress, stop)
                    outcome.runs.append(
                        summarise(
                            target.name, level, repeat, progress, campaign.slo, streams=not repeat
                        )
                    )
    finally:
        outcome.interrupted = stop.is_set()
        for _, transport in alive:
            await transport.close()


def _plan(campaign: Campaign, level: Level, repeat: int) -> Plan:
    """The same for each target; new prefixes for each level and repeat."""
    return build_plan(
        campaign.workload,
        f"{campaign.seed}/{level.kind}-{level.value:g}/{repeat}",
        int(level.value) if level.kind == "concurrency" else None,
        level.value if level.kind == "rate_per_s" else None,
    )


async def _greet(target: Target, outcome: Outcome) -> Target | None:
    try:
        target = replace(target, model=target.model or await find_model(target))
    except RequestError as error:
        outcome.targets.append(TargetInfo(target.name, target.url, target.model, str(error)))
        return None
    outcome.targets.append(TargetInfo(target.name, target.url, _told_name(target.model)))
    return target


def _told_name(model: str) -> str:
    """As a report may tell it: some servers name a model by its path on their machine."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


async def _warm_up(transport: Transport, plan: Plan, prefixes: bool) -> None:
    """A server that fails here shows the same fault in the run, where it counts."""
    with contextlib.suppress(RequestError):
        await warm_up(transport, plan, prefixes=prefixes)

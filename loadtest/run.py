"""Runs a plan against one target: workers of closed loops, arrivals of open ones, and probes beside
the streams of others."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import aiohttp

from loadtest.arrival import Beside
from loadtest.measure.client import ClientWatch
from loadtest.measure.progress import Progress
from loadtest.measure.sample import Kind, RequestError, Role, Sample, of_status
from loadtest.plan import PartPlan, Plan, Session
from loadtest.transports import Dialogue, Target, Transport
from loadtest.transports.base import open_http, told

T = TypeVar("T")
LOOK_S = 0.02
MODELS_S = 15.0


async def find_model(target: Target) -> str:
    """The first model that the target lists. Raises RequestError for a target that is dead or
    lists none."""
    limit_s = min(MODELS_S, target.stall_s)
    async with open_http(target) as http:
        try:
            limit = aiohttp.ClientTimeout(total=limit_s)
            async with http.get(f"{target.url}/v1/models", timeout=limit) as response:
                if response.status != 200:
                    raise of_status(response.status, await response.text())
                listed = (await response.json(content_type=None))["data"]
                return str(listed[0]["id"])
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not str(error):
                raise RequestError(Kind.STALLED, f"no answer within {limit_s:g} s") from error
            raise told(error) from error
        except (LookupError, TypeError, ValueError) as error:
            raise of_status(200, f"no model is listed at /v1/models ({error!r})") from error


async def warm_up(transport: Transport, plan: Plan, *, prefixes: bool) -> None:
    """One small request, so that what a server does only once is not measured; with `prefixes`
    one for each system prompt of the plan, so that a prefix cache begins full. Raises
    RequestError."""
    starts = plan.systems() if prefixes else []
    pasts = [Dialogue("warm-up", one.system, one.tools) for one in starts]
    for dialogue in pasts or [Dialogue("warm-up", "", ())]:
        dialogue.texts.append("Say ready.")
        await transport.send(dialogue, Sample("warm-up", "", 0, 2, time.perf_counter()))
        await transport.leave(dialogue)


async def run_plan(
    plan: Plan, transport: Transport, progress: Progress, stop: asyncio.Event
) -> None:
    """Send the plan. Returns when every session is over, or soon after `stop` is set: then what
    is in flight is given up, and noted as interrupted."""
    runner = _Runner(transport, progress)
    async with ClientWatch() as watch:
        progress.start_s = time.perf_counter()
        try:
            progress.interrupted = not await unless_stopped(runner.run(plan), stop)
        finally:
            progress.end_s = time.perf_counter()
    progress.client = watch.load


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`; None when `stop` came first, and `work` is then cancelled and over."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait([task, stopped])
    return None if task.cancelled() else task.result()


class _Runner:
    def __init__(self, transport: Transport, progress: Progress) -> None:
        self._transport = transport
        self._progress = progress
        self._workers: list[str] = []
        self._num_probing = 0

    async def run(self, plan: Plan) -> bool:
        """Send it all; True, so that an end can be told from a stop."""
        probing = [(part, part.beside) for part in plan.parts if part.beside is not None]
        for part, beside in probing:
            for session in part.sessions[: beside.alone]:
                now_s = time.perf_counter()
                await self._session(session, part.name, now_s, role=Role.PROBE_ALONE)
        self._num_probing = len(probing)
        queues = []
        async with asyncio.TaskGroup() as group:
            for part in plan.parts:
                if part.concurrency is not None:
                    queues.append(iter(part.sessions))
                    for _ in range(part.concurrency):
                        group.create_task(self._worker(part, queues[-1], bool(probing)))
                        self._workers.append(part.name)
                elif part.beside is None:
                    group.create_task(self._arrivals(part))
            for part, beside in probing:
                group.create_task(self._probe(part, beside, len(self._workers)))
        self._progress.num_turns -= sum(one.num_turns for queue in queues for one in queue)
        return True

    async def _worker(self, part: PartPlan, queue: Iterator[Session], for_probes: bool) -> None:
        while self._num_probing or not for_probes:
            session = next(queue, None)
            if session is None:
                break
            await self._session(session, part.name, time.perf_counter())
        self._workers.remove(part.name)

    async def _probe(self, part: PartPlan, beside: Beside, num_streams: int) -> None:
        """The part's other sessions, each in the middle of the workers' streams. Those for which
        the workers have no streams left count as skipped."""
        probes = part.sessions[beside.alone :]
        for index, session in enumerate(probes):
            await self._all_stream(num_streams)
            await asyncio.sleep(beside.pause_s)
            if not await self._all_stream(num_streams):
                self._progress.num_skipped += sum(one.num_turns for one in probes[index:])
                break
            await self._session(session, part.name, time.perf_counter(), role=Role.PROBE_BESIDE)
        self._num_probing -= 1

    async def _all_stream(self, num_streams: int) -> bool:
        """Wait until every worker has had its first token; False when one has nothing left."""
        while len(self._workers) == num_streams:
            flying = self._progress.in_flight.values()
            if sum(one.part in self._workers and bool(one.pieces) for one in flying) == num_streams:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _arrivals(self, part: PartPlan) -> None:
        async with asyncio.TaskGroup() as group:
            for session in part.sessions:
                due_s = self._progress.start_s + (session.start_s or 0.0)
                await _until(due_s)
                group.create_task(self._session(session, part.name, due_s))

    async def _session(
        self,
        session: Session,
        part: str,
        due_s: float,
        past: Dialogue | None = None,
        role: Role = Role.ORDINARY,
    ) -> None:
        """A session, or a fork that goes on from `past`; over when its forks are."""
        dialogue = past or Dialogue(session.id, session.system, session.tools)
        first = len(dialogue.texts) // 2
        async with asyncio.TaskGroup() as forks:
            try:
                for index, turn in enumerate(session.turns):
                    due_s += turn.wait_s
                    await _until(due_s)
                    dialogue.texts.append(turn.text)
                    sample = Sample(
                        session.id, part, first + index, turn.max_tokens, due_s, role=role
                    )
                    if not await self._turn(dialogue, sample):
                        self._progress.num_skipped += _left(session, index)
                        break
                    due_s = sample.end_s
                    if index + 1 == session.fork_after:
                        for fork in session.forks:
                            past = dialogue.fork(fork.id)
                            forks.create_task(self._session(fork, part, due_s, past, role))
            finally:
                await self._transport.leave(dialogue)

    async def _turn(self, dialogue: Dialogue, sample: Sample) -> bool:
        """Send one turn; True when it was answered, and the answer is then in the dialogue."""
        progress = self._progress
        sample.prompt_bytes = dialogue.num_bytes()
        progress.in_flight[id(sample)] = sample
        try:
            await self._transport.send(dialogue, sample)
        except RequestError as error:
            sample.error, sample.message = error.kind, str(error)
        except asyncio.CancelledError:
            sample.interrupted = True
            raise
        finally:
            sample.end_s = time.perf_counter()
            del progress.in_flight[id(sample)]
            progress.samples.append(sample)
        dialogue.texts.append(sample.text)
        dialogue.response_id = sample.response_id
        return sample.error is None


async def _until(time_s: float) -> None:
    await asyncio.sleep(max(time_s - time.perf_counter(), 0.0))


def _left(session: Session, index: int) -> int:
    """Turns that a failure at `index` leaves unsent, forks not begun included."""
    forks = session.forks if index < session.fork_after else ()
    return len(session.turns) - index - 1 + sum(fork.num_turns for fork in forks)

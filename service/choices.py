"""Several generations of one answer: begun together, read side by side."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import anyio

from engine.types import TokenLogprobs, unpack_tokens
from service.answer import Answer
from service.asking import SEED_BITS
from service.conversation import GenerationRequest
from service.errors import from_failure
from service.events import Admitted, Completed, Event, Failed, PromptScored, RequestRecord, Usage
from service.generation import Generator

_SEED_MASK = (1 << SEED_BITS) - 1


@dataclass(slots=True)
class Choice:
    """One generation, joined. `scored` are the prompt's tokens from the second on."""

    answer: Answer = field(default_factory=Answer)
    scored: list[TokenLogprobs] = field(default_factory=list)
    end: Completed | None = None

    @property
    def ended(self) -> Completed:
        """How it ended; only after `gather`."""
        assert self.end is not None  # the path's contract: exactly one terminal event
        return self.end

    def add(self, event: Event) -> None:
        """Take in an event that is no failure."""
        match event:
            case PromptScored():
                self.scored += event.logprobs
            case Completed():
                self.end = event
            case _:
                self.answer.add(event)


def nth_choice(request: GenerationRequest, index: int, *, scores: bool) -> GenerationRequest:
    """The request of a later choice than the first: with an id of its own and, where there is a
    seed, with `seed + index`. It does not score the prompt unless `scores`."""
    options = request.options
    seed = None if options.seed is None else (options.seed + index) & _SEED_MASK
    options = replace(options, seed=seed)
    if not scores:
        options = replace(options, prompt_logprobs=None)
    return replace(request, id=f"{request.id}-{index}", options=options)


async def begin(
    stack: AsyncExitStack, events: AsyncGenerator[Event, None]
) -> tuple[Admitted, AsyncGenerator[Event, None]]:
    """Start a generation; `stack` closes it. Raises ApiError where it is refused."""
    stack.push_async_callback(events.aclose)
    admitted = await anext(events)
    assert isinstance(admitted, Admitted)
    return admitted, events


async def begin_copies(
    stack: AsyncExitStack,
    generator: Generator,
    request: GenerationRequest,
    admitted: Admitted,
    records: Sequence[RequestRecord],
    *,
    scores: bool = False,
) -> tuple[list[Event], list[AsyncGenerator[Event, None]]]:
    """Start choices 1, 2, ... of the prompt that choice 0 began with, one for each record; what
    choice 0 computes of the prompt they take from the cache. With `scores` they score it too,
    where it does. Raises as `begin`."""
    first: list[Event] = []
    started: list[AsyncGenerator[Event, None]] = []
    for index, record in enumerate(records, 1):
        prompt = unpack_tokens(admitted.token_ids)
        choice = nth_choice(request, index, scores=scores)
        each, events = await begin(stack, generator.run_tokens(choice, prompt, record))
        first.append(each)
        started.append(events)
    return first, started


async def gather(choices: Sequence[AsyncGenerator[Event, None]]) -> list[Choice]:
    """Read all to their ends, side by side, as an unread generation pauses. Raises ApiError for
    the first that fails; the caller closes the others."""
    joined = [Choice() for _ in choices]
    failures: list[Failed] = []

    async def read(choice: Choice, events: AsyncGenerator[Event, None]) -> None:
        async for event in events:
            if isinstance(event, Failed):
                failures.append(event)
                tasks.cancel_scope.cancel()
                return
            choice.add(event)

    async with anyio.create_task_group() as tasks:
        for choice, events in zip(joined, choices, strict=True):
            tasks.start_soon(read, choice, events)
    if failures:
        raise from_failure(failures[0])
    return joined


def total_usage(ends: Sequence[Completed], per_prompt: int) -> Usage:
    """What an answer used: every prompt once, with what its first choice took from the cache,
    and every choice's output. `per_prompt` choices in a row share a prompt."""
    first = ends[::per_prompt]
    return Usage(
        sum(end.usage.prompt_tokens for end in first),
        sum(end.usage.cached_tokens for end in first),
        sum(end.usage.output_tokens for end in ends),
        ends[0].usage.cache,
        sum(end.usage.reasoning_tokens for end in ends),
        sum(end.usage.accepted_prediction_tokens for end in ends),
        sum(end.usage.rejected_prediction_tokens for end in ends),
    )

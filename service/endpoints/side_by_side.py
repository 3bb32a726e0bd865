"""Answers of several generations: begun together, then streamed or joined, in any dialect."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from anyio import to_thread
from starlette.types import Send

from service.choices import Choice, gather
from service.endpoints.generating import Call
from service.events import Event, RequestRecord
from service.services import Services
from service.telemetry.sinks import all_finished
from service.transport.http import send_answer, while_connected
from service.transport.sse import ChoiceEncoder, send_choices


@dataclass(slots=True)
class Begun:
    """The first event of each generation, and those that follow it, choice by choice."""

    first: list[Event] = field(default_factory=list)
    choices: list[AsyncGenerator[Event, None]] = field(default_factory=list)

    def add(self, other: "Begun") -> None:
        self.first += other.first
        self.choices += other.choices


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an answer is written: `stream` makes the encoder of a streamed one, and is None for an
    answer that is not; `whole` encodes all choices of the other."""

    stream: Callable[[], ChoiceEncoder] | None
    whole: Callable[[Sequence[Choice]], bytes]


def choice_records(
    call: Call, model: str, *, stream: bool, num_prompts: int, num_each: int
) -> list[RequestRecord]:
    """The records of all generations of a request, prompt by prompt, `num_each` of each."""
    group, num_choices = secrets.token_hex(8), num_prompts * num_each
    records: list[RequestRecord] = []
    for choice in range(num_choices):
        record = call.record(model, stream=stream)
        record.choice, record.num_choices = choice, num_choices
        record.num_per_prompt, record.group = num_each, group
        records.append(record)
    return records


async def answer_choices(
    call: Call,
    services: Services,
    records: Sequence[RequestRecord],
    begin: Callable[[AsyncExitStack], Awaitable[tuple[Begun, Dialect]]],
) -> None:
    """Begin the generations, whose closing `begin` leaves to the stack, and answer with them.

    Raises ApiError while nothing has been answered; ClientGone if the client left.
    """

    async def answer() -> None:
        with all_finished(services.records, records):
            async with AsyncExitStack() as stack:
                begun, dialect = await begin(stack)
                if dialect.stream is None:
                    await _send_whole(call.send, begun, dialect)
                    return
                encoder, limits = dialect.stream(), services.settings.limits
                await send_choices(
                    call.scope, call.send, begun.first, begun.choices, encoder, records, limits
                )

    await while_connected(call.receive, answer, records)


async def _send_whole(send: Send, begun: Begun, dialect: Dialect) -> None:
    joined = await gather(begun.choices)
    # Log-probabilities of a long answer are hundreds of thousands of objects.
    many = any(choice.answer.tokens or choice.scored for choice in joined)
    body = await to_thread.run_sync(dialect.whole, joined) if many else dialect.whole(joined)
    await send_answer(send, 200, body)

"""`Responses`: how a response of any transport begins, runs, is remembered and ends.

A transport reads the events of a `Turn` at its client's pace and sends the frames that
`Turn.take` makes of them. A background response reads itself; who wants to see it reads its log.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
import msgspec

from engine.text import Vocabulary
from engine.types import Phase
from service.cache.diagnosis import Diagnosis, Fingerprint, diagnose, fingerprint
from service.conversation import GenerationOptions, GenerationRequest
from service.dialects.responses_decode import CreateRequest, ResponseCreate, in_this_dialect
from service.dialects.responses_encode import ResponseEncoder
from service.dialects.responses_entries import Cancelled, Entry, Progress
from service.errors import RETRY_SOON, ApiError, invalid
from service.events import Admitted, Event, RequestRecord
from service.generation import Generator
from service.responses.store import ResponsesStore, StoredResponse
from service.telemetry.log_context import TRACE_ID
from service.telemetry.sinks import finish_refused

LANE_TTL_S: Final = 300.0
"""How long a lane's prompt is leased: agents' tools take seconds to minutes."""
OUR_FAULT = "The server failed on this request; this is its fault."

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a create came with: the headers are its own, or those its connection began with.

    It arrived, was then received and decoded, and may have waited for its turn since.
    `trace_number` names its trace where it brings none.
    """

    request_id: str
    tenant: str
    headers: Mapping[str, str]
    arrived_ns: int
    received_ns: int
    streamed: bool
    trace_number: int


class Turn:
    """A running response: its events as they come, and what becomes of them."""

    def __init__(
        self,
        stored: StoredResponse,
        encoder: ResponseEncoder,
        record: RequestRecord,
        store: ResponsesStore,
        diagnose: Callable[[bytes], Diagnosis] | None,
    ) -> None:
        """`diagnose` compares the prompt's packed tokens with those of an earlier response."""
        self.stored = stored
        self.encoder = encoder
        self.record = record
        self.events: AsyncGenerator[Event, None]
        self._store = store
        self._diagnose = diagnose

    def take(self, entry: Entry) -> list[bytes]:
        """The frames of an event. It is remembered first, so that what a client was told of can
        be continued, and is told the same again."""
        if isinstance(entry, Admitted) and self._diagnose is not None:
            entry = replace(entry, diagnosis=self._diagnose(entry.token_ids))
        self._store.append(self.stored, entry)
        frames = self.encoder.encode(entry)
        self.record.num_frames += len(frames)
        self.record.num_bytes += sum(map(len, frames))
        return frames

    def progress(self) -> list[bytes]:
        """The frames that tell a waiting client that the response is alive; none once it ended."""
        return [] if self.encoder.finished else self.take(Progress())


@dataclass(slots=True, eq=False)
class _Background:
    """A response that runs for itself. `settled` is set when it was admitted or refused."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    settled: anyio.Event = field(default_factory=anyio.Event)
    turn: Turn | None = None
    refusal: ApiError | None = None
    task: asyncio.Task[None] | None = None


class Responses:
    """The responses of one server. Used from one event loop only.

    Background responses are tasks of the loop: a connection's end is not theirs, `drain` waits
    for them, and the end of the loop cancels what is left.
    """

    def __init__(
        self,
        generator: Generator,
        store: ResponsesStore,
        model: str,
        vocabulary: Vocabulary,
        max_background: int,
    ) -> None:
        """`model` is the served id; more than `max_background` detached responses are refused."""
        self._generator = generator
        self._store = store
        self._model = model
        self._vocabulary = vocabulary
        self._max_background = max_background
        self._background: set[_Background] = set()
        self._ended = anyio.Event()

    def find(self, tenant: str, response_id: str) -> StoredResponse:
        """A response of the tenant that may be looked at. Raises ApiError 404."""
        stored = self._store.get(tenant, response_id)
        if stored is None or not stored.kept:
            raise ApiError(
                404,
                f"Response with id {response_id!r} not found.",
                code="response_not_found",
                param="response_id",
            )
        return stored

    async def replay(
        self, stored: StoredResponse, after: int = -1
    ) -> AsyncGenerator[list[bytes], None]:
        """The frames numbered above `after` as they were told, then those that are still to
        come."""
        encoder = self._encoder_again(stored)
        number = 0
        async for entries in stored.log.read():
            frames = [frame for entry in entries for frame in encoder.encode(entry)]
            if unseen := frames[max(0, after + 1 - number) :]:
                yield unseen
            number += len(frames)

    async def describe(self, stored: StoredResponse) -> bytes:
        """The response object as it stands, as JSON."""
        encoder = self._encoder_again(stored)
        async for entries in stored.log.read_told():
            for entry in entries:
                encoder.encode(entry)
        return encoder.response

    def has_ended(self, tenant: str, response_id: str) -> bool:
        """Whether this is a response of the tenant's that is remembered and runs no more."""
        stored = self._store.get(tenant, response_id)
        return stored is not None and not stored.running

    def previous(
        self, tenant: str, response_id: str | None, *, unkept: bool = False
    ) -> StoredResponse | None:
        """What a create continues; `unkept`: also a response of `store: false`.

        Raises ApiError 400 `previous_response_not_found`.
        """
        if response_id is None:
            return None
        stored = self._store.get(tenant, response_id)
        if stored is None or not (stored.kept or unkept):
            raise invalid(
                "previous_response_id",
                f"Previous response with id {response_id!r} not found.",
                "previous_response_not_found",
            )
        return stored

    @asynccontextmanager
    async def run(
        self,
        request: CreateRequest,
        origin: Origin,
        *,
        on_socket: bool = False,
        stream_id: str | None = None,
    ) -> AsyncIterator[Turn]:
        """A turn whose `events` the body reads.

        Raises ApiError for what is refused before Admitted, here or by the events, and the
        response is as if it had never been. Left before its end, a response is cancelled. With
        `store: false` it can be continued from sockets only, where it began on one.
        """
        body = request.body
        kept = body.store is not False
        record = self._record(request, origin)
        try:
            previous = self.previous(origin.tenant, body.previous_response_id, unkept=on_socket)
        except ApiError as error:
            finish_refused(self._generator.records, record, error)
            raise
        stored = self._store.begin(
            origin.tenant,
            request.input,
            previous=previous,
            request=msgspec.json.encode(msgspec.structs.replace(body, input=None)),
            generates=body.generates,
            kept=kept,
            background=body.background is True,
        )
        if not kept and not on_socket:
            self._store.delete(stored)
        record.conversation_id = stored.conversation_id
        encoder = self._encoder_of(stored, body, stream_id)
        turn = Turn(stored, encoder, record, self._store, self._comparison(body, origin.tenant))
        try:
            conversation = request.conversation(stored.prompt())
            kept_prefixes = request.kept(conversation)
            # Up to a breakpoint is what the client wants kept, not what comes after it.
            options = replace(request.options, keep_s=None) if kept_prefixes else request.options
            generation = GenerationRequest(
                id=stored.id,
                model=self._model,
                conversation=conversation,
                options=_leased(options) if on_socket else options,
                former=b"" if stored.previous is None else stored.previous.tokens(),
                kept=kept_prefixes,
            )
            async with aclosing(self._generator.run(generation, turn.record)) as turn.events:
                yield turn
        finally:
            if not turn.encoder.started:
                self._store.discard(stored)
            elif stored.running:
                turn.take(Cancelled(turn.record.usage))

    def _comparison(self, body: ResponseCreate, tenant: str) -> Callable[[bytes], Diagnosis] | None:
        """Compares with the response that the client names; None where it names none."""
        if body.comparison_id is None:
            return None
        found = self._store.get(tenant, body.comparison_id)
        former, num_required = None, 0
        if found is not None and found.prompt_tokens:
            its = msgspec.json.decode(found.request, type=ResponseCreate)
            former, num_required = _fingerprint(its, found.tokens()), found.num_prompt_tokens
        return lambda tokens: diagnose(former, _fingerprint(body, tokens), num_required)

    async def start(self, request: CreateRequest, origin: Origin) -> StoredResponse:
        """Begin a response that nobody holds, and return when it is admitted.

        Raises ApiError for what is refused before, 429 for one too many.
        """
        if len(self._background) >= self._max_background:
            refusal = ApiError(
                429,
                "Too many background responses are running.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers=RETRY_SOON,
            )
            finish_refused(self._generator.records, self._record(request, origin), refusal)
            raise refusal
        background = _Background()
        self._background.add(background)
        running = self.run(request, origin)
        # A task of its own, as the one that asks ends with its connection.
        background.task = asyncio.get_running_loop().create_task(_read(background, running))
        background.task.add_done_callback(lambda _: self._remove(background))
        await background.settled.wait()
        if background.turn is None:
            raise background.refusal or ApiError(500, OUR_FAULT, type="server_error")
        return background.turn.stored

    def forget(self, stored: StoredResponse) -> None:
        """Delete a response; a background one that runs is cancelled."""
        self._store.delete(stored)
        self._stop(stored)

    async def cancel(self, stored: StoredResponse) -> None:
        """End a background response and return when it has ended; one that has ended stays as it
        is. Raises ApiError 400 for a response that was not created with `background`."""
        if not stored.background:
            raise invalid(
                "response_id", "Only responses created with 'background: true' can be cancelled."
            )
        self._stop(stored)
        await stored.log.wait_end()

    async def drain(self) -> None:
        """Return when no background response runs; the drain of the engine ends them."""
        while self._background:
            await self._ended.wait()

    def _encoder_of(
        self, stored: StoredResponse, body: ResponseCreate, stream_id: str | None = None
    ) -> ResponseEncoder:
        """An encoder that makes the same frames whenever it is given the response's events."""
        return ResponseEncoder(
            stored.id,
            body,
            self._model,
            self._vocabulary,
            stream_id=stream_id,
            created_at=stored.created_at,
            clock=lambda: stored.ended_at,
        )

    def _encoder_again(self, stored: StoredResponse) -> ResponseEncoder:
        return self._encoder_of(stored, msgspec.json.decode(stored.request, type=ResponseCreate))

    def _stop(self, stored: StoredResponse) -> None:
        for background in self._background:
            if background.turn is not None and background.turn.stored is stored:
                background.scope.cancel()

    def _remove(self, background: _Background) -> None:
        self._background.remove(background)
        self._ended.set()
        self._ended = anyio.Event()

    def _record(self, request: CreateRequest, origin: Origin) -> RequestRecord:
        traceparent, tracestate = request.trace_context(origin.headers)
        record = RequestRecord(
            operation="chat",
            path="/v1/responses",
            model=self._model,
            start_ns=origin.arrived_ns,
            request_id=origin.request_id,
            tenant=origin.tenant,
            stream=origin.streamed,
            phases=[Phase("receive", origin.arrived_ns, origin.received_ns)],
            traceparent=traceparent,
            tracestate=tracestate,
            previous_response_id=request.body.previous_response_id,
            trace_number=origin.trace_number,
        )
        TRACE_ID.set(record.trace_id)
        record.stamp("lane")
        connection = origin.headers.get("traceparent")
        if connection != traceparent:
            record.connection_traceparent = connection
        return record


async def _read(background: _Background, running: AbstractAsyncContextManager[Turn]) -> None:
    """The whole life of a background response."""
    try:
        with background.scope:
            async with running as turn:
                async for event in turn.events:
                    turn.take(event)
                    background.turn = turn
                    background.settled.set()
    except ApiError as error:
        background.refusal = in_this_dialect(error)
    except Exception:
        log.exception("a background response failed")
    finally:
        background.settled.set()


def _fingerprint(body: ResponseCreate, token_ids: bytes) -> Fingerprint:
    return fingerprint(token_ids, body.cache_salt or "", body.tools or (), body.instructions)


def _leased(options: GenerationOptions) -> GenerationOptions:
    """What a lane has said stays for its next turn, whatever else runs meanwhile."""
    return replace(options, keep_s=max(options.keep_s or 0.0, LANE_TTL_S))

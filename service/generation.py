"""The one generation path: every dialect decodes before it and encodes after it."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.api import Engine, EngineError
from engine.types import (
    EngineEvent,
    Finished,
    FinishReason,
    KeepPrefix,
    Started,
    pack_tokens,
    unpack_tokens,
)
from service.access.limiter import TenantLimiter
from service.asking import engine_request
from service.cache.report import summarise
from service.conversation import GenerationOptions, GenerationRequest
from service.early_refusal import EarlyRefusal, num_characters
from service.errors import ApiError, from_engine
from service.events import Admitted, Completed, Content, Event, RequestRecord
from service.prediction import count_predicted
from service.prompts import PromptRenderer, RenderedPrompt
from service.reading import Reading
from service.telemetry.sinks import RecordSink
from service.tools.reader import AnswerReaders

TokenIds = NDArray[np.int32] | list[int]

ABORT_GRACE_S = 2.0
_TOKEN_CHARACTERS = 16
"""Of a prediction, so many are read for each token that may be said."""

log = logging.getLogger(__name__)


class Generator:
    """Runs generations on one engine, for all dialects and transports."""

    def __init__(
        self,
        engine: Engine,
        renderer: PromptRenderer,
        readers: AnswerReaders,
        records: RecordSink,
        limiter: TenantLimiter,
        *,
        captures_content: bool = False,
    ) -> None:
        """`captures_content`: records keep what was said."""
        self._captures_content = captures_content
        self._engine = engine
        self._renderer = renderer
        self._readers = readers
        self.records = records
        self.open: dict[str, RequestRecord] = {}
        """Of the generations that have begun and not ended, by their ids."""
        self._limiter = limiter
        self.early = EarlyRefusal(engine)

    def run(self, request: GenerationRequest, record: RequestRecord) -> AsyncGenerator[Event, None]:
        """Events of one generation: Admitted, its pieces, then exactly one Completed or Failed.

        What is refused before Admitted is raised as ApiError; after it nothing is raised.
        Closing the generator (use `aclosing`) or cancelling its reader aborts the request in the
        engine. However it ends, `record` is filled and handed to telemetry once.
        """
        return self._run(request, record, lambda: self._render(request, record))

    def run_tokens(
        self, request: GenerationRequest, token_ids: TokenIds, record: RequestRecord
    ) -> AsyncGenerator[Event, None]:
        """As `run`, for a prompt that is tokens already; `request.conversation` is not read."""

        async def given() -> RenderedPrompt:
            return RenderedPrompt(np.asarray(token_ids, dtype=np.int32), "")

        return self._run(request, record, given)

    def refuse_early(
        self, num_characters: int, options: GenerationOptions, record: RequestRecord
    ) -> None:
        """Raises ApiError for a prompt of so many characters that the engine would refuse for its
        load: a prompt need not be tokenised for that."""
        weight = self._limiter.weight(record.tenant)
        self.early.check(num_characters, record.tenant, weight, options.priority)

    async def _render(self, request: GenerationRequest, record: RequestRecord) -> RenderedPrompt:
        """The prompt, and beside it what is to be kept of it."""
        self.refuse_early(num_characters(request.conversation), request.options, record)
        former = unpack_tokens(request.former) if request.former else None
        # A tenant's salts are scopes of their own, as they are in the prefix cache.
        scope = msgspec.json.encode([record.tenant, request.options.salt]).decode()
        kept = [np.empty(0, dtype=np.int32)] * len(request.kept)

        async def render_kept(index: int) -> None:
            prefix = request.kept[index].conversation
            with contextlib.suppress(ApiError):  # some templates take none that ends there
                kept[index] = (await self._renderer.render(prefix, None, scope)).token_ids

        refusal: ApiError | None = None
        async with anyio.create_task_group() as tasks:
            for index, prefix in enumerate(request.kept):
                if prefix.conversation is not request.conversation:
                    tasks.start_soon(render_kept, index)
            try:
                prompt = await self._renderer.render(request.conversation, former, scope)
            except ApiError as error:
                refusal = error
                tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal
        record.num_replayed_tokens = prompt.num_replayed
        token_ids = prompt.token_ids
        record.stamp("tokenize", num_tokens=len(token_ids))
        self.early.learn(len(prompt.text), len(token_ids))
        asked: list[KeepPrefix] = []
        for prefix, tokens in zip(request.kept, kept, strict=True):
            whole = prefix.conversation is request.conversation
            count = len(token_ids) if whole else _num_common(token_ids, tokens)
            asked.append(KeepPrefix(count, prefix.ttl_s))
        return replace(prompt, kept=tuple(asked)) if asked else prompt

    async def _run(
        self,
        request: GenerationRequest,
        record: RequestRecord,
        render: Callable[[], Awaitable[RenderedPrompt]],
    ) -> AsyncGenerator[Event, None]:
        record.response_id = request.id
        if self._captures_content:
            record.content = Content(request.conversation)
        self.open[request.id] = record
        try:
            with self._limiter.admit(record):
                prompt = await render()
                reading = await self._begin(request, record, prompt)
                async with aclosing(self._read(reading)) as events:
                    async for event in events:
                        if isinstance(event, Completed):
                            self._renderer.remember(prompt, event.token_ids)
                        if record.content is not None:
                            record.content.events.append(event)
                        yield event
        except ApiError as error:
            record.error_type, record.error_param = error.code or error.type, error.param
            raise
        except Exception:
            record.error_type = "server_error"
            raise
        except (GeneratorExit, anyio.get_cancelled_exc_class()):
            record.finish_reason = record.finish_reason or FinishReason.ABORT
            raise
        finally:
            record.close(time.monotonic_ns())
            self.open.pop(request.id, None)
            self.records.finish(record)

    async def _begin(
        self, request: GenerationRequest, record: RequestRecord, prompt: RenderedPrompt
    ) -> Reading:
        token_ids = prompt.token_ids
        grammar = await self._readers.grammar(request, token_ids)
        prediction = await self._prediction(request.options)
        asked = engine_request(
            request,
            prompt,
            record,
            self._engine.info,
            grammar=grammar,
            prediction=prediction,
            shown_token_ids=self._readers.shown_ids(request),
            weight=self._limiter.weight(record.tenant),
        )
        record.stamp("prepare")
        try:
            stream = self._engine.generate(asked)
        except EngineError as error:
            raise from_engine(error) from error
        record.rest = "engine"
        reader = self._readers.reader(request, token_ids)
        return Reading(stream, asked, reader, record, request)

    async def _prediction(self, options: GenerationOptions) -> bytes:
        """Its tokens, no more than may be said."""
        limit = self._engine.info.max_context
        text = options.prediction[: limit * _TOKEN_CHARACTERS]
        if not text:
            return b""
        return pack_tokens((await self._renderer.tokenize(text, False))[:limit])

    async def _read(self, reading: Reading) -> AsyncGenerator[Event, None]:
        """Admitted and all that follows; the stream is closed and its end recorded in any case."""
        try:
            yield Admitted(reading.num_prompt_tokens, reading.prompt, reading.kept)
            async for event in reading.stream:
                if isinstance(event, Started) and reading.wants_summary:
                    await self._summarise(reading, event)
                events = [event, *reading.stream.ready()]
                if reading.prediction and isinstance(events[-1], Finished):
                    await self._compare(reading, events)
                for translated in reading.translate(events):
                    yield translated
            if not reading.finished:
                yield reading.fail("The engine ended the request without a result.")
        except Exception:
            log.exception("generation %s failed", reading.request_id)
            yield reading.fail("The server failed while it generated; this is its fault.")
        finally:
            if not reading.finished:
                await self._abort(reading)
            await reading.stream.aclose()

    async def _summarise(self, reading: Reading, started: Started) -> None:
        """Put the cache's report into words, off the event loop."""
        if started.cache is None:
            return
        reading.summary = await anyio.to_thread.run_sync(
            summarise,
            started.cache,
            unpack_tokens(reading.prompt),
            self._readers.vocabulary,
            reading.request.conversation,
        )

    async def _compare(self, reading: Reading, last: list[EngineEvent]) -> None:
        """Count what of the prediction came true, off the event loop."""
        reading.num_predicted_tokens = await anyio.to_thread.run_sync(
            count_predicted,
            unpack_tokens(reading.prediction),
            unpack_tokens(reading.said_with(last)),
        )

    async def _abort(self, reading: Reading) -> None:
        """End a request nobody reads, and learn what it had used."""
        with anyio.move_on_after(ABORT_GRACE_S, shield=True):
            self._engine.abort(reading.request_id)
            try:
                async for event in reading.stream:
                    reading.account(event)
            except EngineError as error:
                log.warning("request %s was lost on abort: %s", reading.request_id, error)
        reading.settle()


def _num_common(one: TokenIds, other: TokenIds) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differs[0]) if len(differs) else length

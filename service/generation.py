"""The one generation path: every dialect decodes before it and encodes after it."""

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.api import Engine, EngineError, EventStream
from engine.text import Utf8Assembler
from engine.types import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    KeepPrefix,
    PromptLogprobs,
    SamplingParams,
    Started,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)
from service.access.limiter import TenantLimiter
from service.cache.report import CacheSummary, summarise
from service.conversation import (
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_P,
    GenerationOptions,
    GenerationRequest,
)
from service.early_refusal import EarlyRefusal, num_characters
from service.errors import ApiError, context_exceeded, from_engine
from service.events import (
    Admitted,
    Completed,
    Content,
    Event,
    Failed,
    PromptScored,
    RequestRecord,
    TokenText,
    Usage,
)
from service.prompts import PromptRenderer, RenderedPrompt
from service.telemetry.sinks import RecordSink
from service.tools.reader import AnswerReader, AnswerReaders

TokenIds = NDArray[np.int32] | list[int]

SEED_BITS = 63
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
            record.error_type = error.code or error.type
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
    ) -> "_Reading":
        token_ids = prompt.token_ids
        grammar = await self._readers.grammar(request, token_ids)
        prediction = await self._prediction(request.options)
        engine_request = self._engine_request(request, prompt, grammar, prediction, record)
        record.stamp("prepare")
        try:
            stream = self._engine.generate(engine_request)
        except EngineError as error:
            raise from_engine(error) from error
        record.rest = "engine"
        reader = self._readers.reader(request, token_ids)
        return _Reading(stream, engine_request, reader, record, request)

    async def _read(self, reading: "_Reading") -> AsyncGenerator[Event, None]:
        """Admitted and all that follows; the stream is closed and its end recorded in any case."""
        try:
            yield Admitted(reading.num_prompt_tokens, reading.prompt, reading.kept)
            async for event in reading.stream:
                if isinstance(event, Started) and reading.wants_summary:
                    await self._summarise(reading, event)
                for translated in reading.translate([event, *reading.stream.ready()]):
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

    async def _summarise(self, reading: "_Reading", started: Started) -> None:
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

    async def _abort(self, reading: "_Reading") -> None:
        """End a request nobody reads, and learn what it had used."""
        with anyio.move_on_after(ABORT_GRACE_S, shield=True):
            self._engine.abort(reading.request_id)
            try:
                async for event in reading.stream:
                    reading.account(event)
            except EngineError as error:
                log.warning("request %s was lost on abort: %s", reading.request_id, error)
        reading.settle()

    def _engine_request(
        self,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        grammar: str,
        prediction: bytes,
        record: RequestRecord,
    ) -> EngineRequest:
        options, token_ids = request.options, prompt.token_ids
        sampling = self._sampling(options, len(token_ids))
        record.options.update(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        # What the client did not ask for is not told as if it had.
        if options.top_k:
            record.options["top_k"] = options.top_k
        if options.seed is not None:
            record.options["seed"] = options.seed
        if options.stop:
            record.options["stop_sequences"] = list(options.stop)
        if options.frequency_penalty:
            record.options["frequency_penalty"] = options.frequency_penalty
        if options.presence_penalty:
            record.options["presence_penalty"] = options.presence_penalty
        whole = () if options.keep_s is None else (KeepPrefix(-1, options.keep_s),)
        # A deadline of 0 means none, so the shortest timeout is a nanosecond.
        timeout_ns = max(1, int(options.timeout_s * 1e9)) if options.timeout_s else 0
        return EngineRequest(
            id=request.id,
            token_ids=pack_tokens(token_ids),
            sampling=sampling,
            tenant=record.tenant,
            salt=options.salt,
            priority=options.priority,
            weight=self._limiter.weight(record.tenant),
            deadline_ns=record.start_ns + timeout_ns if timeout_ns else 0,
            shown_token_ids=self._readers.shown_ids(request),
            grammar=grammar,
            keep=(*prompt.kept, *whole),
            trace_id=record.trace_id,
            prediction=prediction,
        )

    async def _prediction(self, options: GenerationOptions) -> bytes:
        """Its tokens, no more than may be said."""
        limit = self._engine.info.max_context
        text = options.prediction[: limit * _TOKEN_CHARACTERS]
        if not text:
            return b""
        return pack_tokens((await self._renderer.tokenize(text, False))[:limit])

    def _sampling(self, options: GenerationOptions, num_prompt_tokens: int) -> SamplingParams:
        max_tokens = self._max_tokens(options, num_prompt_tokens)
        temperature = options.temperature
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=DEFAULT_TEMPERATURE if temperature is None else temperature,
            top_k=options.top_k or 0,
            top_p=DEFAULT_TOP_P if options.top_p is None else options.top_p,
            min_p=options.min_p or 0.0,
            seed=secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
            stop=tuple(stop.encode() for stop in options.stop),
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            frequency_penalty=options.frequency_penalty or 0.0,
            presence_penalty=options.presence_penalty or 0.0,
            repetition_penalty=options.repetition_penalty or 1.0,
            logit_bias=options.logit_bias,
            allowed_token_ids=options.allowed_token_ids,
            min_tokens=options.min_tokens,
            include_stop=options.include_stop,
            prompt_logprobs=options.prompt_logprobs,
        )

    def _max_tokens(self, options: GenerationOptions, num_prompt_tokens: int) -> int:
        """Raises ApiError 400 `context_length_exceeded` with both numbers."""
        limit = self._engine.info.max_context
        asked = options.max_tokens
        needed = 1 if asked is None or options.fit_max_tokens else asked
        if num_prompt_tokens + needed > limit:
            raise context_exceeded(
                "messages" if num_prompt_tokens >= limit else "max_tokens",
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt_tokens + needed} tokens ({num_prompt_tokens} in the prompt, "
                f"{needed} for the completion).",
            )
        if asked is not None and not options.fit_max_tokens:
            return asked
        info = self._engine.info
        left = max(1, min(limit, info.num_pages * info.page_size) - num_prompt_tokens)
        return left if asked is None else min(asked, left)


class _Reading:
    """One request's way from engine events to events of the edge, and what it adds up to."""

    def __init__(
        self,
        stream: EventStream,
        request: EngineRequest,
        reader: AnswerReader,
        record: RequestRecord,
        asked: GenerationRequest,
    ) -> None:
        self.request = asked
        self.wants_summary = asked.options.cache_report
        self.summary: CacheSummary | None = None
        self.kept = request.keep
        self._num_prediction_tokens = len(request.prediction) // 4
        self.stream = stream
        self.request_id = request.id
        self.prompt = request.token_ids
        self.num_prompt_tokens = len(unpack_tokens(request.token_ids))
        self.finished = False
        self._record = record
        self._utf8 = Utf8Assembler()
        self._reader = reader
        self._token_ids = bytearray()
        self._usage = record.usage = Usage(self.num_prompt_tokens, 0, 0)

    def account(self, event: EngineEvent) -> None:
        """Take an event into the record."""
        record = self._record
        if isinstance(event, Started):
            self._usage = Usage(event.num_prompt_tokens, event.num_cached_tokens, 0)
            record.cache = event.cache
        elif isinstance(event, TokenDelta):
            if event.token_ids:
                record.token_ns.append(event.time_ns)
            self._token_ids += event.token_ids
            self._reader.count(event.token_ids)
        elif isinstance(event, Finished):
            self.finished = True
            summary = self.summary
            if summary is not None:
                summary = msgspec.structs.replace(summary, leases=event.leases)
            self._usage = Usage(
                event.num_prompt_tokens,
                event.num_cached_tokens,
                event.num_output_tokens,
                summary,
                self._reader.num_thought_tokens,
                event.num_predicted_tokens,
                max(0, self._num_prediction_tokens - event.num_predicted_tokens),
            )
            record.usage = self._usage
            record.finish_reason = record.finish_reason or event.reason
            record.num_preemptions = event.num_preemptions
            record.num_draft_tokens = event.num_draft_tokens
            record.num_accepted_tokens = event.num_accepted_tokens
            record.donor = event.donor
            record.take_engine_phases(event.phases)

    def translate(self, events: list[EngineEvent]) -> list[Event]:
        """The events of the edge that events of the engine mean; tokens that came together are
        told together."""
        told: list[Event] = []
        text = b""
        tokens: tuple[TokenText, ...] = ()
        end: Finished | None = None
        for event in events:
            if isinstance(event, TokenDelta):
                self.account(event)
                text += event.text
                tokens += _token_texts(event)
            elif isinstance(event, Finished):
                end = event
            else:
                self.account(event)
                if isinstance(event, PromptLogprobs):
                    told.append(PromptScored(event.logprobs))
        told += self._reader.feed(self._utf8.feed(text), tokens)
        if end is not None:
            self.account(end)
            told += self._reader.feed(self._utf8.finish()) + self._reader.finish()
            told.append(self._terminal(end))
        return told

    def settle(self) -> None:
        """Without a Finished the record counts the tokens that were seen."""
        if not self.finished:
            used = self._usage
            self._record.usage = Usage(
                used.prompt_tokens, used.cached_tokens, len(self._token_ids) // 4
            )

    def fail(self, message: str) -> Failed:
        """The terminal event for what went wrong on this side."""
        record = self._record
        record.finish_reason = FinishReason.ERROR
        record.error_type = "server_error"
        return Failed(FinishReason.ERROR, message, self._usage)

    def _terminal(self, event: Finished) -> Completed | Failed:
        usage = self._usage
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            stop = event.stop.decode("utf-8", "replace") if event.stop else None
            ids = tuple(unpack_tokens(self._token_ids).tolist())
            return Completed(
                event.reason,
                usage,
                stop,
                ids,
                num_tool_calls=self._reader.num_calls,
                stop_token_id=event.stop_token_id,
            )
        self._record.error_type = event.reason.value
        return Failed(
            event.reason, event.message or _FAILURES[event.reason], usage, event.retryable
        )


_FAILURES = {
    FinishReason.ABORT: "The request was aborted because the server is shutting down.",
    FinishReason.DEADLINE: "The request did not finish within its timeout.",
    FinishReason.ERROR: "The engine failed while it ran this request.",
}


def _num_common(one: TokenIds, other: TokenIds) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differs[0]) if len(differs) else length


def _token_texts(event: TokenDelta) -> tuple[TokenText, ...]:
    if not event.logprobs:
        return ()
    ids: list[int] = unpack_tokens(event.token_ids).tolist()
    return tuple(map(TokenText, ids, event.logprobs))

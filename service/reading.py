"""`Reading`: one request's way from the engine's events to those of the edge."""

import msgspec

from engine.api import EventStream
from engine.text import Utf8Assembler
from engine.types import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenDelta,
    unpack_tokens,
)
from service.cache.report import CacheSummary, ShownLease
from service.conversation import GenerationRequest
from service.events import (
    Completed,
    Event,
    Failed,
    PromptScored,
    RequestRecord,
    TokenText,
    Usage,
)
from service.tools.reader import AnswerReader


class Reading:
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
        self.prediction = request.prediction
        self.num_predicted_tokens = 0
        """How many of its tokens were said, once that has been counted."""
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
                shown = tuple(map(ShownLease.of, event.leases))
                summary = msgspec.structs.replace(summary, leases=shown)
            self._usage = Usage(
                event.num_prompt_tokens,
                event.num_cached_tokens,
                event.num_output_tokens,
                summary,
                self._reader.num_thought_tokens,
                self.num_predicted_tokens,
                max(0, len(self.prediction) // 4 - self.num_predicted_tokens),
            )
            record.usage = self._usage
            record.finish_reason = record.finish_reason or event.reason
            record.num_preemptions = event.num_preemptions
            record.num_draft_tokens = event.num_draft_tokens
            record.num_accepted_tokens = event.num_accepted_tokens
            record.donor = event.donor
            record.take_engine_phases(event.phases)

    def said_with(self, events: list[EngineEvent]) -> bytes:
        """All tokens up to now, packed, and those of events that are not translated yet."""
        new = (event.token_ids for event in events if isinstance(event, TokenDelta))
        return b"".join((self._token_ids, *new))

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


def _token_texts(event: TokenDelta) -> tuple[TokenText, ...]:
    if not event.logprobs:
        return ()
    ids: list[int] = unpack_tokens(event.token_ids).tolist()
    return tuple(map(TokenText, ids, event.logprobs))

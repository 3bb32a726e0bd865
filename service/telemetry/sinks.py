"""Who is told of requests that have ended."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from engine.types import FinishReason
from service.errors import ApiError
from service.events import RequestRecord


class RecordSink(Protocol):
    """Takes the record of a request that has ended; returns at once and never raises."""

    def finish(self, record: RequestRecord) -> None:
        """The caller no longer changes the record."""


class Sinks:
    """Tells several, in order."""

    def __init__(self, *sinks: RecordSink) -> None:
        self._sinks = sinks

    def finish(self, record: RequestRecord) -> None:
        """Hand the record to each."""
        for sink in self._sinks:
            sink.finish(record)


class Gathering:
    """Brings together the records of a request's choices, which end one after another."""

    def __init__(self) -> None:
        self._choices: dict[str, list[RequestRecord]] = {}

    def add(self, record: RequestRecord) -> list[RequestRecord]:
        """All records of the request, in the order of its choices, once the last has come; none
        before."""
        if record.num_choices == 1:
            return [record]
        choices = self._choices.setdefault(record.group, [])
        choices.append(record)
        if len(choices) < record.num_choices:
            return []
        del self._choices[record.group]
        return sorted(choices, key=lambda each: each.choice)


def finish_refused(sink: RecordSink, record: RequestRecord, error: ApiError) -> None:
    """Tell of a request that ended before it could be generated; one that has ended stays so."""
    if not record.end_ns:
        record.error_type, record.error_param = error.code or error.type, error.param
        record.close(time.monotonic_ns())
        sink.finish(record)


@contextmanager
def all_finished(sink: RecordSink, records: Sequence[RequestRecord]) -> Iterator[None]:
    """Whatever happens inside, each of `records` is told of once: those that never began end as
    the others made them end."""
    try:
        yield
    except ApiError as error:
        for record in records:
            finish_refused(sink, record, error)
        raise
    finally:
        for record in records:
            if not record.end_ns:
                record.finish_reason = FinishReason.ABORT
                record.close(time.monotonic_ns())
                sink.finish(record)

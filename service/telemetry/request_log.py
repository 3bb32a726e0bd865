"""One line per request when it has ended; nothing per step, nothing of its content."""

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np

from engine.types import Phase
from service.events import RequestRecord, total_usage
from service.telemetry.sinks import Gathering

_COMPUTED: Final = ("prefill", "decode")

log = logging.getLogger(__name__)


class RequestLog:
    """A `RecordSink` that logs `ended key=value …`, its trace's id among them."""

    def __init__(self) -> None:
        self._gathering = Gathering()

    def finish(self, record: RequestRecord) -> None:
        """Log the request, at INFO, when this was the last of its choices."""
        choices = self._gathering.add(record)
        if choices and log.isEnabledFor(logging.INFO):
            log.info("ended %s", " ".join(f"{k}={v}" for k, v in _fields(choices).items()))


def _fields(choices: Sequence[RequestRecord]) -> dict[str, str | int]:
    """What is not known is left out."""
    record = choices[0]
    fields: dict[str, str | int] = {"request": record.request_id} if record.request_id else {}
    fields |= {
        "trace": record.trace_id,
        "outcome": ",".join(dict.fromkeys(map(_outcome, choices))),
        "operation": record.operation,
        **({"path": record.path} if record.path else {}),
        **({"param": _word(record.error_param)} if record.error_param else {}),
        "total_ms": _ms(max(each.end_ns for each in choices) - record.start_ns),
    }
    if record.response_id:
        fields["response"] = record.response_id
    if len(choices) > 1:
        fields["choices"] = len(choices)
    if (usage := total_usage(choices)) is not None:
        fields["prompt"] = usage.prompt_tokens
        fields["cached"] = usage.cached_tokens
        fields["output"] = usage.output_tokens
    if begun := [each.first_token_ns for each in choices if each.first_token_ns]:
        fields["ttft_ms"] = _ms(min(begun) - record.start_ns)
    gaps = np.concatenate([np.diff(np.array(each.token_ns)) for each in choices])
    if gaps.size:
        gaps.sort()  # np.percentile would import 8 ms of modules at the first request's end
        for share in (50, 99):
            fields[f"itl_p{share}_ms"] = _ms(float(gaps[round((gaps.size - 1) * share / 100)]))
    if preemptions := sum(each.num_preemptions for each in choices):
        fields["preemptions"] = preemptions
    phases = [phase for each in choices for phase in each.phases]
    for name in _COMPUTED:
        if verdict := _verdict([phase for phase in phases if phase.name == name]):
            fields[name] = verdict
    return fields


def _outcome(record: RequestRecord) -> str:
    if record.finish_reason is not None:
        return record.finish_reason.value
    return f"refused:{record.error_type}"


def _word(text: str) -> str:
    """A field's path, which a client may have made up, as one word of a line."""
    return "".join(each if each.isprintable() and each not in " =" else "_" for each in text)[:128]


def _verdict(phases: list[Phase]) -> str:
    """What the longest of the phases waited for."""
    if not phases:
        return ""
    return max(phases, key=lambda phase: phase.end_ns - phase.start_ns).verdict.value


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f}"

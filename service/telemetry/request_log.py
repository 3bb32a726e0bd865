"""One line per request when it has ended; nothing per step, nothing of its content."""

import logging
from typing import Final

import numpy as np

from engine.types import Phase
from service.events import RequestRecord

_COMPUTED: Final = ("prefill", "decode")

log = logging.getLogger(__name__)


class RequestLog:
    """A `RecordSink` that logs `ended key=value …`, its trace's id among them."""

    def finish(self, record: RequestRecord) -> None:
        """Log the request, at INFO."""
        if log.isEnabledFor(logging.INFO):
            log.info("ended %s", " ".join(f"{k}={v}" for k, v in _fields(record).items()))


def _fields(record: RequestRecord) -> dict[str, str | int]:
    """What is not known is left out."""
    usage, reason = record.usage, record.finish_reason
    outcome = reason.value if reason else f"refused:{record.error_type}"
    fields: dict[str, str | int] = {
        "request": record.request_id,
        "trace": record.trace_id,
        "outcome": outcome,
        "operation": record.operation,
        "total_ms": _ms(record.end_ns - record.start_ns),
    }
    if record.response_id:
        fields["response"] = record.response_id
    if record.num_choices > 1:
        fields["choice"] = record.choice
    if usage is not None:
        fields["prompt"] = usage.prompt_tokens
        fields["cached"] = usage.cached_tokens
        fields["output"] = usage.output_tokens
    if record.first_token_ns:
        fields["ttft_ms"] = _ms(record.first_token_ns - record.start_ns)
    if len(record.token_ns) > 1:
        gaps = np.diff(np.array(record.token_ns))
        for share in (50, 99):
            fields[f"itl_p{share}_ms"] = _ms(float(np.percentile(gaps, share)))
    if record.num_preemptions:
        fields["preemptions"] = record.num_preemptions
    for name in _COMPUTED:
        if verdict := _verdict([phase for phase in record.phases if phase.name == name]):
            fields[name] = verdict
    return fields


def _verdict(phases: list[Phase]) -> str:
    """What the longest of the phases waited for."""
    if not phases:
        return ""
    return max(phases, key=lambda phase: phase.end_ns - phase.start_ns).verdict.value


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f}"

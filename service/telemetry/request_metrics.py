"""What the requests that ended add up to: each is counted once, when it has ended, however."""

from typing import Final

import numpy as np

from engine.types import FinishReason
from service.events import RequestRecord
from service.telemetry import metric_list as m
from service.telemetry.samples import Counts, Labels
from service.telemetry.span_attributes import PROVIDER_NAME

ENGINE: Final = "0"
"""The label of the one engine, as vLLM counts its engines."""

_QUEUED: Final = ("queue",)
_COMPUTED: Final = ("prefill", "decode")


class RequestMetrics:
    """A `RecordSink`. Called on the event loop: about 30 µs a request, nothing per token."""

    def __init__(self, counts: Counts, model: str, address: str, port: int) -> None:
        """`model` is the served id; `address` and `port` are where the server listens."""
        self._counts = counts
        self._model = model
        self._where = (address, str(port))

    def finish(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        if record.usage is not None:
            self._count_served(record)
        elif record.choice:
            return  # a choice that never began: the request is refused, or cut, once
        elif record.error_type:
            self._counts.add(m.REJECTED, (self._model, ENGINE, record.error_type))
        else:
            self._count_end(record, FinishReason.ABORT)
        labels = (*self._gen_ai(record), _error_type(record))
        self._counts.observe(m.REQUEST_DURATION, labels, _seconds(record.start_ns, record.end_ns))

    def _count_end(self, record: RequestRecord, reason: FinishReason) -> None:
        labels = (self._model, ENGINE)
        self._counts.add(m.FINISHED, (*labels, reason.value))
        spent_s = _seconds(record.start_ns, record.end_ns)
        self._counts.observe(m.VLLM_E2E, labels, spent_s)
        if record.choice == 0:
            self._counts.observe(m.VLLM_N, labels, record.num_choices)

    def _count_served(self, record: RequestRecord) -> None:
        """A request that the engine took: its tokens, and the times it reached."""
        counts, usage = self._counts, record.usage
        assert usage is not None
        labels = (self._model, ENGINE)
        self._count_end(record, record.finish_reason or FinishReason.ERROR)
        counts.observe(m.VLLM_PROMPT, labels, usage.prompt_tokens)
        counts.observe(m.VLLM_GENERATION, labels, usage.output_tokens)
        counts.observe(m.VLLM_COMPUTED, labels, usage.prompt_tokens - usage.cached_tokens)
        counts.observe(m.VLLM_REQUEST_PREEMPTIONS, labels, record.num_preemptions)
        max_tokens = record.options.get("max_tokens")
        if isinstance(max_tokens, int):
            counts.observe(m.VLLM_MAX_TOKENS, labels, max_tokens)
        gen_ai = self._gen_ai(record)
        counts.observe(m.TOKEN_USAGE, (*gen_ai, "input"), usage.prompt_tokens)
        counts.observe(m.TOKEN_USAGE, (*gen_ai, "output"), usage.output_tokens)
        self._count_phases(record, labels)
        self._count_tokens(record, labels, gen_ai)

    def _count_phases(self, record: RequestRecord, labels: Labels) -> None:
        """Times of the phases it reached; one that it did not reach is no sample."""
        counts = self._counts
        spent: dict[str, int] = {}
        for phase in record.phases:
            spent[phase.name] = spent.get(phase.name, 0) + phase.end_ns - phase.start_ns
        for metric, names in (
            (m.VLLM_QUEUE, _QUEUED),
            (m.VLLM_PREFILL, _COMPUTED[:1]),
            (m.VLLM_DECODE, _COMPUTED[1:]),
            (m.VLLM_INFERENCE, _COMPUTED),
        ):
            if any(name in spent for name in names):
                total = sum(spent.get(name, 0) for name in names)
                counts.observe(metric, labels, total / 1e9)

    def _count_tokens(self, record: RequestRecord, labels: Labels, gen_ai: Labels) -> None:
        if not record.first_token_ns:
            return
        counts = self._counts
        first_s = _seconds(record.start_ns, record.first_token_ns)
        counts.observe(m.VLLM_TTFT, labels, first_s)
        if record.succeeded:
            counts.observe(m.TIME_TO_FIRST_TOKEN, gen_ai, first_s)
        if len(record.token_ns) > 1:
            times = np.diff(np.array(record.token_ns)) / 1e9
            counts.observe_all(m.VLLM_ITL, labels, times)
        usage = record.usage
        if usage is not None and usage.output_tokens > 1:
            spoken_s = _seconds(record.first_token_ns, record.token_ns[-1])
            each_s = spoken_s / (usage.output_tokens - 1)
            counts.observe(m.VLLM_TPOT, labels, each_s)
            if record.succeeded:
                counts.observe(m.TIME_PER_OUTPUT_TOKEN, gen_ai, each_s)

    def _gen_ai(self, record: RequestRecord) -> Labels:
        """Clients choose the model's name, so it is told only where it is the served one."""
        model = record.model if record.usage is not None else ""
        return (record.operation, PROVIDER_NAME, model, self._model, *self._where)


def _error_type(record: RequestRecord) -> str:
    if record.error_type:
        return record.error_type
    return "" if record.succeeded else str(record.finish_reason or "disconnected")


def _seconds(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) / 1e9

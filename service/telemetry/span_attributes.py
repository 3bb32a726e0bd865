"""What spans say of a request: OpenTelemetry's GenAI attributes, and our own beside them."""

from typing import Final, TypeAlias

from engine.types import Phase
from service.events import RequestRecord, Usage, total_usage

PROVIDER_NAME: Final = "headwater"

Attributes: TypeAlias = dict[str, int | float | str | bool | list[str]]


def request_attributes(choices: list[RequestRecord]) -> Attributes:
    """Of a request's span; what is unknown is left out, never made up."""
    record = choices[0]
    attributes: Attributes = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER_NAME,
        "headwater.stream.frames": sum(each.num_frames for each in choices),
        "headwater.stream.bytes": sum(each.num_bytes for each in choices),
        **{f"gen_ai.request.{name}": value for name, value in record.options.items()},
    }
    optional = {
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model if record.usage else "",
        "gen_ai.response.id": record.response_id,
        "gen_ai.conversation.id": record.conversation_id,
        "gen_ai.request.previous_response.id": record.previous_response_id,
        "headwater.request.id": record.request_id,
        "headwater.cache.donor_response.id": record.donor,
    }
    attributes.update({name: value for name, value in optional.items() if value})
    if record.stream:
        attributes["gen_ai.request.stream"] = True
    if len(choices) > 1:
        attributes["gen_ai.request.choice.count"] = len(choices)
    reasons = [each.finish_reason.value for each in choices if each.finish_reason is not None]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if preemptions := sum(each.num_preemptions for each in choices):
        attributes["headwater.preemptions"] = preemptions
    if drafts := sum(each.num_draft_tokens for each in choices):
        accepted = sum(each.num_accepted_tokens for each in choices)
        attributes["headwater.speculation.draft_tokens"] = drafts
        attributes["headwater.speculation.accepted_tokens"] = accepted
    if record.num_replayed_tokens:
        attributes["headwater.prompt.replayed_tokens"] = record.num_replayed_tokens
    if (usage := total_usage(choices)) is not None:
        attributes.update(_usage(usage))
    if record.cache is not None:
        attributes["headwater.cache.reason"] = record.cache.reason or "none"
        attributes["headwater.cache.position"] = record.cache.position
        attributes["headwater.cache.in_flight_tokens"] = record.cache.num_in_flight_tokens
        attributes["headwater.cache.disk_tokens"] = record.cache.num_disk_tokens
        if record.cache.reason == "evicted":
            attributes["headwater.cache.evicted_ago_s"] = record.cache.evicted_ago_s
    if record.first_token_ns:
        waited_ns = record.first_token_ns - record.start_ns
        attributes["gen_ai.response.time_to_first_chunk"] = waited_ns / 1e9
    return attributes


def phase_attributes(phase: Phase, record: RequestRecord) -> Attributes:
    """Of the span of one phase."""
    attributes: Attributes = {"openinference.span.kind": "CHAIN"}
    if phase.num_tokens:
        attributes["headwater.tokens"] = phase.num_tokens
    if phase.name == "prefill":
        attributes["headwater.start_position"] = phase.start_position
    elif phase.name == "prefix_match":
        on_device = "device" if phase.num_tokens else "none"
        attributes["headwater.match_kind"] = "disk" if phase.num_disk_tokens else on_device
    if phase.kernel_ns:
        wall_ns = max(1, phase.end_ns - phase.start_ns)
        attributes["headwater.roofline.mbu"] = round(phase.memory_ns / wall_ns, 4)
        attributes["headwater.roofline.mfu"] = round(phase.compute_ns / wall_ns, 4)
        host_ns = max(0, wall_ns - phase.kernel_ns)
        attributes["headwater.roofline.host_share"] = round(host_ns / wall_ns, 4)
        attributes["headwater.roofline.verdict"] = phase.verdict.value
    if phase.name == "stream":
        attributes["headwater.frames"] = record.num_frames
        attributes["headwater.bytes"] = record.num_bytes
    return attributes


def _usage(usage: Usage) -> Attributes:
    written = usage.prompt_tokens - usage.cached_tokens
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        # The convention renamed this attribute; dashboards know the former name.
        "gen_ai.usage.cache_write.input_tokens": written,
        "gen_ai.usage.cache_creation.input_tokens": written,
    }

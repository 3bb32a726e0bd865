"""What a client is told of the cache: where its prompt's tokens came from, and where and why a
match ended, in the words of its own prompt."""

import json
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.text import Vocabulary
from engine.types import CacheReport, LeaseInfo, unpack_tokens
from service.conversation import Conversation

WINDOW: Final = 8
"""Tokens shown before the first difference, and of the prompt from there on."""
_DIVERGED: Final = "diverged"
_REWRITTEN: Final = "history_rewritten"


class Section(msgspec.Struct, frozen=True):
    """A part of the prompt: the n-th message (`name` is its role) or the n-th tool."""

    type: str
    index: int
    name: str


class Divergence(msgspec.Struct, frozen=True):
    """The first token that was not found: its position, what it belongs to, the text around it,
    and what is stored there instead (null where nothing of the own namespace is)."""

    position: int
    section: Section | None
    before: str
    prompt: str
    stored: str | None


class ShownLease(msgspec.Struct, frozen=True):
    """A lease as answers have it; one without an id is one of which nothing was granted."""

    id: str | None
    tokens: int
    tokens_asked: int
    ttl_seconds: float
    remaining_seconds: float
    hits: int
    cache_salt: str | None
    object: str = "cache.lease"

    @staticmethod
    def of(lease: LeaseInfo) -> "ShownLease":
        """The engine's word for it in this shape."""
        return ShownLease(
            id=lease.id or None,
            tokens=lease.num_tokens,
            tokens_asked=lease.num_tokens_asked,
            ttl_seconds=lease.ttl_s,
            remaining_seconds=round(lease.remaining_s, 3),
            hits=lease.num_hits,
            cache_salt=lease.salt or None,
        )


class CacheSummary(msgspec.Struct, frozen=True):
    """The `cache` object of answers; the three kinds of tokens add up to `cached_tokens`."""

    cached_tokens: int
    device_tokens: int
    in_flight_tokens: int
    disk_tokens: int
    missed_tokens: int
    reason: str | None
    first_divergence: Divergence | None
    evicted_seconds_ago: float | None
    leases: tuple[ShownLease, ...] = ()


def summarise(
    report: CacheReport,
    token_ids: NDArray[np.int32],
    vocabulary: Vocabulary,
    conversation: Conversation,
) -> CacheSummary:
    """The report in words, O(prompt). A divergence inside what the assistant said is
    `history_rewritten`: the client, or the template, says it otherwise than it was computed."""
    reason, divergence = report.reason, None
    if reason:
        divergence = _divergence(report, token_ids, vocabulary, conversation)
        section = divergence.section
        if reason == _DIVERGED and section is not None and section.name == "assistant":
            reason = _REWRITTEN
    elsewhere = report.num_in_flight_tokens + report.num_disk_tokens
    return CacheSummary(
        cached_tokens=report.num_cached_tokens,
        device_tokens=report.num_cached_tokens - elsewhere,
        in_flight_tokens=report.num_in_flight_tokens,
        disk_tokens=report.num_disk_tokens,
        missed_tokens=len(token_ids) - report.num_cached_tokens,
        reason=reason or None,
        first_divergence=divergence,
        evicted_seconds_ago=report.evicted_ago_s if reason == "evicted" else None,
    )


def _divergence(
    report: CacheReport,
    token_ids: NDArray[np.int32],
    vocabulary: Vocabulary,
    conversation: Conversation,
) -> Divergence:
    position = report.position

    def text(ids: NDArray[np.int32]) -> bytes:
        return b"".join(map(vocabulary.token_bytes, ids.tolist()))

    before = text(token_ids[:position])
    rest = text(token_ids[position:])
    stored = text(unpack_tokens(report.stored))
    return Divergence(
        position,
        _section(before + rest, len(before), conversation),
        _shown(text(token_ids[max(0, position - WINDOW) : position])),
        _shown(text(token_ids[position : position + WINDOW])),
        _shown(stored) if stored else None,
    )


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _section(data: bytes, offset: int, conversation: Conversation) -> Section | None:
    """The first part of the rendered prompt that ends behind the offset; None for what stands
    behind all parts, or where there are none."""
    ends = sorted(_parts(data, conversation), key=lambda part: part[0])
    return next((section for end, section in ends if end > offset), None)


def _parts(data: bytes, conversation: Conversation) -> Iterator[tuple[int, Section]]:
    """Where the parts of a conversation end in its rendered bytes, as far as they are found."""
    for index, tool in enumerate(conversation.tools):
        spec = json.dumps(tool.spec, ensure_ascii=False).encode("utf-8", "replace")
        named = json.dumps(tool.name).encode()
        at = data.find(spec)
        end = at + len(spec) if at >= 0 else data.find(b"\n", data.find(named) + 1)
        if end > 0 and named in data:
            yield end, Section("tool", index, tool.name)
    cursor = 0
    for index, message in enumerate(conversation.messages):
        said = [message.text.strip(), *(call.arguments for call in message.tool_calls)]
        for text in filter(None, said):
            needle = text.encode("utf-8", "replace")
            at = data.find(needle, cursor)
            if at >= 0:
                cursor = at + len(needle)
                yield cursor, Section("message", index, message.role)

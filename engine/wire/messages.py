"""What crosses the border: commands one way, one message per step the other way (msgpack)."""

from typing import Annotated, Final, TypeAlias

import msgspec
import msgspec.inspect
import xxhash
from msgspec import Meta

from engine.stats import EngineLoad, EngineStats, PoolStats
from engine.types import (
    CacheCall,
    CacheEventInfo,
    CacheReport,
    EngineConfig,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    LeaseInfo,
)
from engine.views import EngineView, NodeView


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message to an engine process: who speaks, and what it shall be. BEGIN is the second.

    `wire` comes first and is never anything else, so that every version can read it."""

    wire: str
    config: msgspec.Raw


BEGIN: Final = b""
"""The second message to an engine process: it takes its weights and its pages. Until then it is a
spare, and the answer to BEGIN, Ready or StartFailed, is the first thing it says."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Take a request; its id is not that of an open one."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request by the next step; an ended one is ignored."""

    request_id: str


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """The reader has read that many tokens more."""

    request_id: str
    credits: Annotated[int, Meta(ge=1)]


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Answered by StatsReply."""

    call_id: int


class AskFlush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Answered by FlushReply."""

    call_id: int


class AskAudit(msgspec.Struct, frozen=True, array_like=True, tag="audit"):
    """Answered by AuditReply, or CallFailed with every difference named."""

    call_id: int


class AskCache(msgspec.Struct, frozen=True, array_like=True, tag="cache"):
    """Answered by ReportReply or LeasesReply."""

    call_id: int
    call: CacheCall


class WatchCache(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Tell the cache's events from now on, or no more."""

    on: bool


class AskView(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """Answered by ViewReply; `tree` asks for the radix tree too."""

    call_id: int
    tree: bool


class AskNode(msgspec.Struct, frozen=True, array_like=True, tag="node"):
    """Answered by NodeReply."""

    call_id: int
    page: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take no more requests, refuse those not started, end when the running ones have ended."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Take no more requests, abort all, end."""


class StatsReply(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """The present counts."""

    call_id: int
    stats: EngineStats


class FlushReply(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """How many cached pages were dropped."""

    call_id: int
    num_pages: int


class AuditReply(msgspec.Struct, frozen=True, array_like=True, tag="audit"):
    """Pages by state, recounted and found right."""

    call_id: int
    pool: PoolStats


class ReportReply(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """What the cache has of a prompt."""

    call_id: int
    report: CacheReport


class LeasesReply(msgspec.Struct, frozen=True, array_like=True, tag="leases"):
    """The leases a call was about."""

    call_id: int
    leases: tuple[LeaseInfo, ...]


class ViewReply(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """The engine as it is now."""

    call_id: int
    view: EngineView


class NodeReply(msgspec.Struct, frozen=True, array_like=True, tag="node"):
    """The node that lists the page, if one does."""

    call_id: int
    node: NodeView | None


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The call raised."""

    call_id: int
    message: str


Reply: TypeAlias = (
    StatsReply
    | FlushReply
    | AuditReply
    | ReportReply
    | LeasesReply
    | ViewReply
    | NodeReply
    | CallFailed
)


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """First message of an engine that started."""

    info: EngineInfo
    load: EngineLoad = EngineLoad()


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="start_failed"):
    """First and last message of an engine that could not start: a sentence for people."""

    message: str


class StepMessage(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All events of one step and the answers to the calls that came before it. `ending` once the
    engine takes no more requests: it drains, closes, or has failed. `load` is as it left them."""

    events: tuple[EngineEvent, ...]
    replies: tuple[Reply, ...] = ()
    ending: bool = False
    cache_events: tuple[CacheEventInfo, ...] = ()
    load: EngineLoad = EngineLoad()


Ask: TypeAlias = AskStats | AskFlush | AskAudit | AskCache | AskView | AskNode
Command: TypeAlias = Add | Abort | Grant | Ask | WatchCache | Drain | Close
FromEngine: TypeAlias = Ready | StartFailed | StepMessage

WIRE: Final = xxhash.xxh3_64_hexdigest(
    repr(msgspec.inspect.multi_type_info([EngineConfig, Command, FromEngine])).encode()
)
"""Names the messages of this code, down to each field's type: two processes that do not agree
would misread each other."""

encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
decode_command = msgspec.msgpack.Decoder[Command](Command).decode
decode_from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode

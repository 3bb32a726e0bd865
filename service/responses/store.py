"""Responses by id, for continuations and forks: bounded by a time to live and by bytes.

One store serves every connection of the server, so a chain outlives the socket it began on. A
response knows its predecessor, and a chain's inputs are kept once however many forks share them.
Used from one event loop only.
"""

import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain as joined

from engine.types import pack_tokens, unpack_tokens
from service.answer import Answer
from service.conversation import Message
from service.dialects.responses_entries import Cancelled, Entry, ResponseStatus, final_status
from service.events import (
    Admitted,
    Completed,
    Failed,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
)
from service.responses.log import EventLog

RECORD_BYTES = 1024
MESSAGE_BYTES = 256


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One turn of a chain, changed only by the store.

    `inherited` is the predecessor's assistant turn as it stood when this turn began: a fork of a
    running response never sees what that response says later. `request` is the JSON of the
    create without its input: with the log it makes the response's frames again. `generates` is
    False for a warm-up, which leaves no assistant turn. `kept` is False for `store: false`, which
    can be continued on a socket and not be looked at. `prompt_tokens` are int32 bytes, empty until
    admitted, and `output_tokens` until completed; times are in seconds of the epoch.
    """

    id: str
    tenant: str
    conversation_id: str
    previous: "StoredResponse | None"
    inherited: tuple[Message, ...]
    input: tuple[Message, ...]
    request: bytes
    generates: bool
    kept: bool
    background: bool
    created_at: float
    num_bytes: int
    expires_at: float
    num_holders: int
    status: ResponseStatus = "in_progress"
    ended_at: float = 0.0
    deleted: bool = False
    log: EventLog = field(default_factory=EventLog)
    said: Answer = field(default_factory=Answer)
    num_calls: int = 0
    final: Message | None = None
    prompt_tokens: bytes = b""
    output_tokens: bytes = b""

    @property
    def running(self) -> bool:
        return self.status == "in_progress"

    @property
    def num_prompt_tokens(self) -> int:
        return len(unpack_tokens(self.prompt_tokens))

    def prompt(self) -> tuple[Message, ...]:
        """What the model reads for this turn, instructions aside: the chain, then the input."""
        turns: list[tuple[Message, ...]] = []
        for node in self.chain():
            turns += (node.input, node.inherited)
        return tuple(joined.from_iterable(reversed(turns)))

    def tokens(self) -> bytes:
        """Ids of what the model read and then said, as far as they are known."""
        return self.prompt_tokens + self.output_tokens

    def following(self, input: tuple[Message, ...]) -> tuple[Message, ...]:
        """What the model reads where `input` continues this response."""
        return (*self.prompt(), *self.turn(), *input)

    def turn(self) -> tuple[Message, ...]:
        """The assistant's turn so far; none while nothing was said and more may come.

        Calls are part of it once they are complete: what was cut cannot be answered.
        """
        if not self.generates:
            return ()
        message = self.final or self.so_far()
        said = message.text or message.tool_calls or self.status == "completed"
        return (message,) if said else ()

    def so_far(self) -> Message:
        """What was said, with the calls that are complete."""
        message = self.said.message()
        return replace(message, tool_calls=message.tool_calls[: self.num_calls])

    def chain(self) -> Iterator["StoredResponse"]:
        """This response, its predecessor, and so on to the first."""
        node: StoredResponse | None = self
        while node is not None:
            yield node
            node = node.previous


class ResponsesStore:
    """Responses of all tenants by (tenant, id).

    The ends of chains are dropped, least recently used first; a response that something continues
    stays as long as that does, and is next in order after the last of its continuations: so a use
    counts for the whole chain and costs the same however long that is. A response that was dropped
    or deleted can no longer be named, and its bytes are released once no continuation needs them.
    Running responses are never dropped.
    """

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s` counts from the last use; `clock` is in seconds, `wall_clock` of the epoch."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._index: dict[tuple[str, str], StoredResponse] = {}
        self._ends: OrderedDict[StoredResponse, None] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of every response that is indexed or needed by one that is."""
        return self._num_bytes

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response, running ones included; None when unknown, deleted, expired or another
        tenant's."""
        self._expire()
        response = self._index.get((tenant, response_id))
        if response is None or response.deleted:
            return None
        self._touch(response)
        return response

    def begin(
        self,
        tenant: str,
        input: tuple[Message, ...],
        *,
        previous: StoredResponse | None = None,
        request: bytes = b"",
        generates: bool = True,
        kept: bool = True,
        background: bool = False,
    ) -> StoredResponse:
        """A new running response under a fresh `resp_` id, visible to forks at once.

        `previous` is what `get` returned, with no await in between.
        """
        self._expire()
        response_id = f"resp_{secrets.token_hex(16)}"
        response = StoredResponse(
            id=response_id,
            tenant=tenant,
            conversation_id=previous.conversation_id if previous else response_id,
            previous=previous,
            inherited=previous.turn() if previous else (),
            input=input,
            request=request,
            generates=generates,
            kept=kept,
            background=background,
            created_at=self._wall_clock(),
            num_bytes=RECORD_BYTES + len(request) + sum(map(_message_bytes, input)),
            expires_at=self._clock() + self._ttl_s,
            num_holders=1,
        )
        if previous is not None:
            previous.num_holders += 1
            self._ends.pop(previous, None)
            if previous.running:  # a copy; a finished text is shared
                response.num_bytes += sum(map(_message_bytes, response.inherited))
        self._index[tenant, response_id] = response
        self._ends[response] = None
        self._num_bytes += response.num_bytes
        self._evict()
        return response

    def append(self, response: StoredResponse, entry: Entry) -> None:
        """Note what the running response tells next. What it says becomes part of its turn; a
        terminal entry ends it, and from there on it can be dropped."""
        if isinstance(entry, Admitted):
            response.prompt_tokens = entry.token_ids
            self._add_bytes(response, len(entry.token_ids))
            entry = replace(entry, token_ids=b"")
        self._add_bytes(response, response.log.append(entry))
        match entry:
            case TextDelta() | ToolCallStarted() | ToolCallDelta():
                response.said.add(entry)
            case ToolCallDone():
                response.num_calls += 1
            case Completed():
                response.output_tokens = pack_tokens(list(entry.token_ids))
                self._finish(response, final_status(entry, generates=response.generates))
            case Failed():
                self._finish(response, "failed")
            case Cancelled():
                self._finish(response, "incomplete" if entry.steered else "cancelled")
            case _:
                pass

    def delete(self, response: StoredResponse) -> None:
        """Forget a response: at once for all who ask, in memory when it has ended."""
        response.deleted = True
        if not response.running:
            self.discard(response)

    def discard(self, response: StoredResponse) -> None:
        """Forget a response whose id nobody was told; nothing where it is forgotten already."""
        if self._index.pop((response.tenant, response.id), None) is not None:
            self._release(response, was_oldest=False)

    def check(self) -> None:
        """Recount holders and bytes of every reachable response, and the ends of chains. Raises
        AssertionError."""
        holders: dict[StoredResponse, int] = {}
        waiting = list(self._index.values())
        for response in waiting:
            known = response in holders
            holders[response] = holders.get(response, 0) + 1
            if not known and response.previous is not None:
                waiting.append(response.previous)
        total = sum(response.num_bytes for response in holders)
        if total != self._num_bytes:
            raise AssertionError(f"{total} bytes reachable, {self._num_bytes} counted")
        for response, count in holders.items():
            if response.num_holders != count:
                raise AssertionError(
                    f"{response.id}: {count} holders, {response.num_holders} counted"
                )

        ends = {each for each in self._index.values() if each.num_holders == 1}
        if ends != set(self._ends):
            raise AssertionError(f"{len(ends)} ends of chains, {len(self._ends)} in order")
        times = [each.expires_at for each in self._ends if not each.running]
        if times != sorted(times):
            raise AssertionError("the ends of chains are not in the order of their last use")

    def _finish(self, response: StoredResponse, status: ResponseStatus) -> None:
        response.status = status
        response.ended_at = self._wall_clock()
        response.final = response.so_far()
        response.said = Answer()
        self._add_bytes(response, _message_bytes(response.final) + len(response.output_tokens))
        if response.deleted:
            self.discard(response)
        self._evict()

    def _add_bytes(self, response: StoredResponse, added: int) -> None:
        response.num_bytes += added
        self._num_bytes += added

    def _touch(self, response: StoredResponse) -> None:
        """Make a response, and so what it continues, the last to go."""
        response.expires_at = self._clock() + self._ttl_s
        if response in self._ends:
            self._ends.move_to_end(response)

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := self._oldest()) is not None and oldest.expires_at <= now:
            self._drop(oldest)

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes and (oldest := self._oldest()) is not None:
            self._drop(oldest)

    def _oldest(self) -> StoredResponse | None:
        """The first to go; running ones, few at a time, are passed over."""
        return next((node for node in self._ends if not node.running), None)

    def _drop(self, oldest: StoredResponse) -> None:
        del self._index[oldest.tenant, oldest.id]
        self._release(oldest, was_oldest=True)

    def _release(self, response: StoredResponse, *, was_oldest: bool) -> None:
        self._ends.pop(response, None)
        node: StoredResponse | None = response
        while node is not None:
            node.num_holders -= 1
            if node.num_holders:
                break
            self._num_bytes -= node.num_bytes
            node = node.previous
        if node is None or node.num_holders > 1 or (node.tenant, node.id) not in self._index:
            return
        # It is an end now: next to go, unless it was used by its own name since.
        self._ends[node] = None
        if was_oldest and node.expires_at <= max(response.expires_at, self._clock()):
            node.expires_at = response.expires_at
            self._ends.move_to_end(node, last=False)
        else:
            self._touch(node)


def _message_bytes(message: Message) -> int:
    calls = sum(sys.getsizeof(call.arguments) for call in message.tool_calls)
    return MESSAGE_BYTES + sys.getsizeof(message.text) + calls

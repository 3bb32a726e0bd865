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
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from engine.types import pack_tokens
from service.conversation import Message

ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

RECORD_BYTES = 1024
MESSAGE_BYTES = 256


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One turn of a chain, changed only by the store.

    `inherited` is the predecessor's assistant turn as it stood when this turn began: a fork of a
    running response never sees what that response says later. `generates` is False for a warm-up,
    which leaves no assistant turn. `output_tokens` are int32 bytes, empty until completed.
    """

    id: str
    tenant: str
    conversation_id: str
    previous: "StoredResponse | None"
    inherited: tuple[Message, ...]
    input: tuple[Message, ...]
    generates: bool
    num_bytes: int
    expires_at: float
    num_holders: int
    status: ResponseStatus = "in_progress"
    pieces: list[str] = field(default_factory=list)
    output_tokens: bytes = b""

    def prompt(self) -> tuple[Message, ...]:
        """What the model reads for this turn, instructions aside: the chain, then the input."""
        turns: list[tuple[Message, ...]] = []
        for node in self.chain():
            turns += (node.input, node.inherited)
        return tuple(message for turn in reversed(turns) for message in turn)

    def turn(self) -> tuple[Message, ...]:
        """The assistant's turn so far; none while nothing was said and more may come."""
        text = "".join(self.pieces)
        if not self.generates or not (text or self.status == "completed"):
            return ()
        return (Message("assistant", text),)

    def chain(self) -> Iterator["StoredResponse"]:
        """This response, its predecessor, and so on to the first."""
        node: StoredResponse | None = self
        while node is not None:
            yield node
            node = node.previous


class ResponsesStore:
    """Responses of all tenants by (tenant, id), least recently used first.

    A use of a response is a use of its whole chain. A response that was dropped from the index
    can no longer be named, and its bytes are released once no continuation needs them.
    Running responses are never dropped.
    """

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s` counts from the last use; `clock` is in seconds."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._index: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of every response that is indexed or needed by one that is."""
        return self._num_bytes

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response, running ones included; None when unknown, expired or another tenant's."""
        self._expire()
        response = self._index.get((tenant, response_id))
        if response is not None:
            self._touch(response)
        return response

    def begin(
        self,
        tenant: str,
        input: tuple[Message, ...],
        *,
        previous: StoredResponse | None = None,
        generates: bool = True,
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
            generates=generates,
            num_bytes=RECORD_BYTES + sum(map(_message_bytes, input)),
            expires_at=self._clock() + self._ttl_s,
            num_holders=1,
        )
        if previous is not None:
            previous.num_holders += 1
            if previous.status == "in_progress":  # a copy; a finished text is shared
                response.num_bytes += sum(map(_message_bytes, response.inherited))
        self._index[tenant, response_id] = response
        self._num_bytes += response.num_bytes
        self._touch(response)
        self._evict()
        return response

    def append(self, response: StoredResponse, text: str) -> None:
        """Add a piece of the running response's text."""
        response.pieces.append(text)

    def finish(
        self, response: StoredResponse, status: ResponseStatus, token_ids: tuple[int, ...] = ()
    ) -> None:
        """End a running response; from here on it can be dropped."""
        text = "".join(response.pieces)
        response.pieces = [text]
        response.output_tokens = pack_tokens(list(token_ids))
        response.status = status
        added = sys.getsizeof(text) + len(response.output_tokens)
        response.num_bytes += added
        self._num_bytes += added
        self._evict()

    def discard(self, response: StoredResponse) -> None:
        """Forget a response whose id nobody was told."""
        del self._index[response.tenant, response.id]
        self._release(response)

    def check(self) -> None:
        """Recount holders and bytes of every reachable response. Raises AssertionError."""
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

    def _touch(self, response: StoredResponse) -> None:
        """Make a chain the last to go; within it, the end goes before what it builds on."""
        expires_at = self._clock() + self._ttl_s
        for node in response.chain():
            key = (node.tenant, node.id)
            if key in self._index:
                node.expires_at = expires_at
                self._index.move_to_end(key)

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := self._oldest()) is not None and oldest.expires_at <= now:
            self.discard(oldest)

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes and (oldest := self._oldest()) is not None:
            self.discard(oldest)

    def _oldest(self) -> StoredResponse | None:
        """The first to go; running ones, few at a time, are passed over."""
        ended = (node for node in self._index.values() if node.status != "in_progress")
        return next(ended, None)

    def _release(self, response: StoredResponse) -> None:
        node: StoredResponse | None = response
        while node is not None:
            node.num_holders -= 1
            if node.num_holders:
                return
            self._num_bytes -= node.num_bytes
            node = node.previous


def _message_bytes(message: Message) -> int:
    calls = sum(sys.getsizeof(call.arguments) for call in message.tool_calls)
    return MESSAGE_BYTES + sys.getsizeof(message.text) + calls

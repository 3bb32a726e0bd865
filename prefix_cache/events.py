"""What becomes cached and what ceases to be, told to whoever watches (routers): pages by name.

A page's name is xxh3-128 over its namespace, field by field, and all tokens up to its end, so equal
prefixes have equal names in every server. Names tell; they never make a hit.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import xxhash

from prefix_cache.key import Namespace
from prefix_cache.lease import Lease
from prefix_cache.radix_tree import Node, RadixForest, TokenIds

_MOST_PENDING: Final = 8192


class EventKind(StrEnum):
    """RESYNC: events were lost, or everything changed; what was known before counts no more."""

    STORED = "stored"
    REMOVED = "removed"
    LEASED = "leased"
    LEASE_ENDED = "lease_ended"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Pages of one prefix, one after another; `parent` is the name of the page before them, empty
    where they begin it. A RESYNC is of no namespace."""

    kind: EventKind
    namespace: Namespace | None
    pages: tuple[bytes, ...] = ()
    parent: bytes = b""
    lease_id: str = ""


class EventLog:
    """Collects events while `watched`; costs nothing else. Full pages only."""

    def __init__(self, page_size: int) -> None:
        self.watched = False
        self._page_size = page_size
        self._pending: deque[CacheEvent] = deque()

    def take(self) -> list[CacheEvent]:
        """The events since the last call, in order."""
        if not self._pending:
            return []
        events = list(self._pending)
        self._pending.clear()
        return events

    def stored(self, namespace: Namespace, tokens: TokenIds, first_page: int) -> None:
        """The tree lists the pages of the tokens from `first_page` on."""
        if self.watched:
            self._add(EventKind.STORED, namespace, tokens, first_page)

    def removed(self, forest: RadixForest, leaf: Node, num_kept: int) -> None:
        """The pages of the leaf behind the first `num_kept` are about to go."""
        if self.watched:
            tokens = forest.path_tokens(leaf, leaf.num_tokens)
            self._add(
                EventKind.REMOVED, forest.namespace_of(leaf), tokens, leaf.first_page + num_kept
            )

    def leased(self, lease: Lease, tokens: Callable[[Lease], TokenIds], *, ended: bool) -> None:
        """A lease was granted or prolonged, or has ended."""
        if self.watched:
            kind = EventKind.LEASE_ENDED if ended else EventKind.LEASED
            self._add(kind, lease.namespace, tokens(lease), 0, lease.id)

    def resync(self) -> None:
        """All that was told counts no more."""
        if self.watched:
            self._pending.clear()
            self._pending.append(CacheEvent(EventKind.RESYNC, None))

    def _add(
        self,
        kind: EventKind,
        namespace: Namespace,
        tokens: TokenIds,
        first_page: int,
        lease_id: str = "",
    ) -> None:
        names = page_names(namespace, tokens, self._page_size)
        pages = tuple(names[first_page:])
        if not pages:
            return
        if len(self._pending) >= _MOST_PENDING:
            self.resync()
        parent = names[first_page - 1] if first_page else b""
        self._pending.append(CacheEvent(kind, namespace, pages, parent, lease_id))


def page_names(namespace: Namespace, tokens: TokenIds, page_size: int) -> list[bytes]:
    """The names of a prefix's full pages, O(tokens)."""
    state = xxhash.xxh3_128()
    for field in Namespace.__dataclass_fields__:
        value = str(getattr(namespace, field)).encode("utf-8", "surrogatepass")
        state.update(len(value).to_bytes(8, "little") + value)
    names: list[bytes] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        state.update(tokens[start : start + page_size].astype("<i4").tobytes())
        names.append(state.digest())
    return names

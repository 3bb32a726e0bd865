"""Why a prompt does not go on from an earlier one: the prompts compared, token by token.

A client names the earlier request; what is told is where the two part, and which part of the
request stands there. Whether the cache still held what they share, its own report says.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import xxhash

from engine.types import unpack_tokens

MAX_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 400

Part: TypeAlias = Literal["", "scope", "tools", "system", "messages"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is compared of a request. `token_ids` are packed: its prompt, and what was answered as
    far as that is known. `scope` is what its cache is kept apart by."""

    token_ids: bytes = field(repr=False)
    scope: str
    tools: bytes
    system: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + _ENTRY_BYTES


class Diagnosis(msgspec.Struct, frozen=True, array_like=True):
    """How a prompt compares with an earlier one: the part in which they differ, "" where it goes
    on from all of it; how many tokens they share, and how many of the new one come after."""

    found: bool
    part: Part = ""
    num_shared: int = 0
    num_missed: int = 0


def fingerprint(token_ids: bytes, scope: str, tools: object, system: object) -> Fingerprint:
    """Of a request; its tools and instructions are anything that JSON can hold."""
    return Fingerprint(token_ids, scope, _digest(tools), _digest(system))


def diagnose(former: Fingerprint | None, current: Fingerprint, num_required: int) -> Diagnosis:
    """Compare with a former request, whose first `num_required` tokens were its prompt; O(prompt).
    None: it is not known."""
    if former is None:
        return Diagnosis(False)
    ids, others = unpack_tokens(current.token_ids), unpack_tokens(former.token_ids)
    length = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:length] != others[:length])
    shared = int(differs[0]) if len(differs) else length
    part: Part = ""
    if former.scope != current.scope:
        part, shared = "scope", 0
    elif shared < num_required:
        part = "messages"
        if former.tools != current.tools:
            part = "tools"
        elif former.system != current.system:
            part = "system"
    return Diagnosis(True, part, shared, len(ids) - shared)


class Fingerprints:
    """Prompts by tenant and id, the least recently used dropped for new ones. Used from one event
    loop only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], Fingerprint] = OrderedDict()

    def get(self, tenant: str, id: str) -> Fingerprint | None:
        """The fingerprint of one of the tenant's requests, where it is still known."""
        found = self._entries.get((tenant, id))
        if found is not None:
            self._entries.move_to_end((tenant, id))
        return found

    def add(self, tenant: str, id: str, entry: Fingerprint) -> None:
        """Remember a request, under an id that is new."""
        self._entries[tenant, id] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= dropped.num_bytes


def _digest(value: object) -> bytes:
    return xxhash.xxh3_128(msgspec.json.encode(value)).digest()

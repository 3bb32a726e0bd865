"""Which fields of a body are known, and what becomes of the others.

A field that a dialect does not know is ignored, as SDKs and gateways send any, and told in the log;
but one that can only be meant as another field is refused with that field's name: written almost
like it, or by the name that another API has for it.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from service.dialects import wire
from service.dialects.fields import MAX_NAME
from service.errors import invalid

MAX_TOLD: Final = 8
"""Ignored fields that the log names."""
_MIN_LENGTH: Final = 5
"""Of names in which a letter too many, too few, or at its neighbour's place is taken for a slip."""
_LONG: Final = 8
"""Of names in which another letter is too: `top_a` is not meant as `top_k`."""
_CASES: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

COMMON: Final = frozenset(
    {
        "user", "metadata", "safety_identifier", "store", "service_tier", "verbosity",
        "reasoning", "reasoning_effort", "include_reasoning", "thinking_token_budget",
        "prompt_cache_key", "prompt_cache_breakpoint", "client_metadata", "traceparent",
        "tracestate", "session_id", "session_params", "request_id", "rid", "extra_key",
        "stream_interval", "models", "provider", "plugins", "tags",
    }
)  # fmt: skip
"""Accepted in every dialect without effect, where it has none of its own."""

CONSTRAINTS: Final = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "stop_sequences": "stop",
}
"""Names of other servers for what `structured_outputs` and `stop` are here."""
_LENGTH: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The top-level fields of one dialect. `known` are those it has or accepts without effect,
    `meant` what a name of other APIs is called here."""

    known: frozenset[str]
    meant: Mapping[str, str]
    _shorter: Mapping[str, str]

    @staticmethod
    def of(
        *kinds: type[msgspec.Struct], harmless: str, length: str, meant: Mapping[str, str]
    ) -> "KnownFields":
        """Those of wire structs, and `harmless` names apart by spaces. `length` is the dialect's
        name for how many tokens may be generated."""
        known = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
        known |= COMMON | set(harmless.split())
        limits = {name: length for name in _LENGTH if name not in known}
        shorter = {each: name for name in sorted(known) for each in _shortened(name)}
        return KnownFields(frozenset(known), limits | dict(meant), shorter)

    def check(self, data: bytes) -> None:
        """Raises ApiError 400 `unknown_parameter` for a field that is meant as another; tells the
        log which others are ignored. `data` is a JSON object."""
        others = [
            name for name in wire.decode(data, dict[str, msgspec.Raw]) if name not in self.known
        ]
        if not others:
            return
        for name in others:
            if meant := self._meant(name):
                shown = name[:MAX_NAME]
                message = f"Unknown parameter: '{shown}'. Did you mean '{meant}'?"
                raise invalid(shown, message, "unknown_parameter")
        told = ", ".join(repr(name[:64]) for name in others[:MAX_TOLD])
        log.info("unknown fields of the body, %d, are ignored: %s", len(others), told)

    def _meant(self, name: str) -> str | None:
        if name in self.meant:
            return self.meant[name]
        if len(name) > MAX_NAME:
            return None
        usual = _CASES.sub("_", name).replace("-", "_").lower()
        if usual in self.meant:
            return self.meant[usual]
        if usual in self.known:
            return usual
        if len(usual) < _MIN_LENGTH:
            return None
        near = [usual, *_shortened(usual)]
        for each in near[1:]:
            if each in self.known:
                return each
        for each in near:
            known = self._shorter.get(each)
            if known and (each == usual or len(usual) >= _LONG or sorted(known) == sorted(usual)):
                return known
        return None


def _shortened(name: str) -> list[str]:
    """The name without each of its characters."""
    return [name[:at] + name[at + 1 :] for at in range(len(name))]

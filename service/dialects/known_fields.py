"""Which fields of a body are known, and what becomes of the others.

A field that a dialect does not know is ignored, as SDKs and gateways send any, and told in the log;
but one that can only be meant as another field is refused with that field's name: written almost
like it, or by the name that another API has for it. So are those of objects within the body whose
slips would change the answer without a word, as far as they are looked at: the first ones of a
list, and what is not very large.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from service.dialects import wire
from service.dialects.fields import MAX_NAME
from service.errors import invalid

MAX_TOLD: Final = 8
"""Ignored fields that the log names."""
MAX_LOOKED_AT: Final = 64
"""Objects of a list: who writes a name wrong does so from the first on."""
MAX_BYTES: Final = 256 << 10
"""Of what is looked into: reading more of it once more could stall others."""
_MIN_LENGTH: Final = 5
"""Of names in which a letter too many, too few, or at its neighbour's place is taken for a slip."""
_LONG: Final = 6
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
_LENGTH: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
    "num_predict",
)
_INSTRUCTIONS: Final = ("system", "system_prompt", "system_instruction", "instructions")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of one dialect's body, or of an object within it. `known` are those it has or
    accepts without effect, `meant` what a name of other APIs is called here, `inside` those of the
    objects, or lists of objects, that its fields hold."""

    known: frozenset[str]
    meant: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, "KnownFields"] = field(default_factory=dict)
    _shorter: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        *kinds: type[msgspec.Struct],
        harmless: str,
        length: str = "",
        system: str = "",
        meant: Mapping[str, str] | None = None,
        inside: "Mapping[str, KnownFields] | None" = None,
    ) -> "KnownFields":
        """Those of a body: of wire structs, and `harmless` names apart by spaces. `length` is the
        dialect's name for how many tokens may be generated, `system` that of where the system's
        text stands."""
        known = COMMON | _names(*kinds) | set(harmless.split())
        others: dict[str, str] = {}
        if length:
            others |= {name: length for name in _LENGTH if name not in known}
        if system:
            others |= {name: system for name in _INSTRUCTIONS if name not in known}
        return _made(known, others | dict(meant or {}), inside)

    @staticmethod
    def within(
        *kinds: type[msgspec.Struct], harmless: str = "", **inside: "KnownFields"
    ) -> "KnownFields":
        """Those of an object within a body: of wire structs, and `harmless` names."""
        return _made(_names(*kinds) | set(harmless.split()), {}, inside)

    def check(self, data: bytes) -> None:
        """Raises ApiError 400 `unknown_parameter` for a field that is meant as another; tells the
        log which others are ignored. `data` is a JSON object."""
        others: dict[str, None] = {}
        self._check(wire.decode(data, dict[str, msgspec.Raw]), "", "", others)
        if others:
            told = ", ".join(repr(name) for name in islice(others, MAX_TOLD))
            log.info("unknown fields of the body, %d, are ignored: %s", len(others), told)

    def _check(
        self, fields: dict[str, msgspec.Raw], path: str, kind: str, others: dict[str, None]
    ) -> None:
        """`path` is where the object stands, `kind` the same for all objects of its list."""
        for name, value in fields.items():
            if name in self.known:
                if inner := self.inside.get(name):
                    inner._check_value(value, f"{path}{name}", f"{kind}{name}", others)
            elif meant := self._meant(name):
                shown = name[:MAX_NAME]
                message = f"Unknown parameter: '{path}{shown}'. Did you mean '{meant}'?"
                raise invalid(f"{path}{shown}", message, "unknown_parameter")
            else:
                others[f"{kind}{name[:64]}"] = None

    def _check_value(
        self, value: msgspec.Raw, path: str, kind: str, others: dict[str, None]
    ) -> None:
        """What is neither an object nor a list of them is for the decoder to judge."""
        if memoryview(value).nbytes > MAX_BYTES:
            return
        if _begins(value, b"{"):
            fields = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
            self._check(fields, f"{path}.", f"{kind}.", others)
        elif _begins(value, b"["):
            values = msgspec.json.decode(value, type=list[msgspec.Raw])[:MAX_LOOKED_AT]
            for index, each in enumerate(values):
                if _begins(each, b"{"):
                    self._check_value(each, f"{path}[{index}]", f"{kind}[]", others)

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


def _made(
    known: frozenset[str] | set[str],
    meant: Mapping[str, str],
    inside: Mapping[str, KnownFields] | None,
) -> KnownFields:
    shorter = {each: name for name in sorted(known) for each in _shortened(name)}
    return KnownFields(frozenset(known), meant, inside or {}, shorter)


def _names(*kinds: type[msgspec.Struct]) -> set[str]:
    return {each.encode_name for kind in kinds for each in msgspec.structs.fields(kind)}


def _begins(value: msgspec.Raw, mark: bytes) -> bool:
    return bytes(memoryview(value)[:1]) == mark


def _shortened(name: str) -> list[str]:
    """The name without each of its characters."""
    return [name[:at] + name[at + 1 :] for at in range(len(name))]


CACHE_OPTIONS: Final = KnownFields.within(harmless="mode ttl prewarm comparison_response_id")
"""Of OpenAI's `prompt_cache_options`."""

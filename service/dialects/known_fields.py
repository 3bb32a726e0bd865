"""Which fields of a body are known, and what becomes of the others.

A field that a dialect does not know is ignored, as SDKs and gateways send any, and told in the log;
but one that can only be meant as another field is refused with that field's name: written almost
like it, or by the name that another API has for it. What other APIs and dialects have to change the
answer, and this dialect has not, is refused as well, unless it is null or its value asks for
nothing. So are slips within the body's objects, which would change the answer without a word, as
far as they are looked at: the first ones of a list, and what is not very large.
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
MAX_COMPARED: Final = 32
"""Unknown names of a body that are compared with the known ones, which takes time."""
_SLIPS: Final = ((7, 5), (6, 3), (4, 2))
"""From how many letters on how much may be wrong: a letter too many, too few, or at its neighbour's
place counts 2, another letter 3 (`top_a` is not meant as `top_k`, nor `min_tokens` as
`max_tokens`)."""
_NO_SLIPS: Final = frozenset(("mode", "speed", "conversation_id"))
"""Fields of gateways and other dialects, though near to `model`, `seed` and `conversation`."""
_LETTER: Final = 2
_OTHER_LETTER: Final = 3
_SEPARATORS: Final = re.compile(r"[-_ ]")

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
    "grammar": "structured_outputs.grammar",
    "stop_sequences": "stop",
}
"""Names of other servers for what `structured_outputs` and `stop` are here."""
_USUAL: Final = {
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "freq_penalty": "frequency_penalty",
    "random_seed": "seed",
}
"""Other names for what most dialects have."""
_SAME_LEVEL: Final = "what it holds stands in the body itself"
_ANSWERS: Final = (
    "format", "response_format", "response_schema", "json_schema", "grammar", "structured_outputs",
    "prediction", "repeat_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "min_tokens", "min_p", "seed", "n", "best_of", "logprobs", "top_logprobs", "echo",
    "suffix", "bad_words", "length_penalty", "web_search_options", "allowed_token_ids",
    "stop_token_ids", "ignore_eos", "no_repeat_ngram_size", "typical_p", "top_a", "tfs_z",
    "mirostat", "dry_multiplier", "xtc_probability", "top_n_sigma", "num_beams", "use_beam_search",
    "custom_logit_processor", "stop_regex", "include_stop_str_in_output", "truncate_prompt_tokens",
    "lora_path", "chat_template", "chat_template_kwargs", "documents", "continue_final_message",
    "add_generation_prompt", "messages", "tools", "functions", "conversation", "background",
    "previous_response_id", "prompt_logprobs", "logprob_token_ids", "return_hidden_states",
    "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "parallel_tool_calls",
)  # fmt: skip
_ELSEWHERE: Final = {
    "options": _SAME_LEVEL,
    "extra_body": _SAME_LEVEL,
    "num_ctx": "the context's length is set where the server starts (--max-context)",
    **dict.fromkeys(_ANSWERS, ""),
}
"""What changes answers where it is known, and what to do instead, if there is something."""
_ASKS_NOTHING: Final = (b"false", b"0", b"0.0", b'""', b"[]", b"{}")
_FACTORS: Final = (
    "n", "best_of", "repeat_penalty", "repetition_penalty", "length_penalty", "num_beams",
    "typical_p", "tfs_z",
)  # fmt: skip
_USUAL_WAYS: Final = (
    "add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens",
    "parallel_tool_calls",
)  # fmt: skip
_NOTHING: Final = {
    **dict.fromkeys(_FACTORS, (*_ASKS_NOTHING, b"1", b"1.0")),
    **dict.fromkeys(_USUAL_WAYS, (b"true",)),
}
"""Of these other values ask for nothing."""
_LENGTH: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
    "num_predict",
    "max_length",
)
_FORMAT: Final = ("response_format", "response_schema", "json_schema", "format")
_INSTRUCTIONS: Final = ("system", "system_prompt", "system_instruction", "instructions")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of one dialect's body, or of an object within it. `known` are those it has or
    accepts without effect, `meant` what a name of other APIs is called here, `inside` those of the
    objects, or lists of objects, that its fields hold. `refused` are names that change answers
    elsewhere, with what to do instead."""

    known: frozenset[str]
    meant: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, "KnownFields"] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    _squeezed: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        *kinds: type[msgspec.Struct],
        harmless: str,
        length: str = "",
        system: str = "",
        format: str = "",
        meant: Mapping[str, str] | None = None,
        inside: "Mapping[str, KnownFields] | None" = None,
    ) -> "KnownFields":
        """Those of a body: of wire structs, and `harmless` names apart by spaces. `length` is the
        dialect's name for how many tokens may be generated, `system` that of where the system's
        text stands, `format` that of what the answer must match."""
        known = COMMON | _names(*kinds) | set(harmless.split())
        others = {name: usual for name, usual in _USUAL.items() if usual in known}
        for names, here in ((_LENGTH, length), (_INSTRUCTIONS, system), (_FORMAT, format)):
            if here:
                others |= dict.fromkeys(names, here)
        others |= meant or {}
        others = {name: here for name, here in others.items() if name not in known}
        told = {n: do for n, do in _ELSEWHERE.items() if n not in known and n not in others}
        return _made(known, _names(*kinds) - COMMON, others, inside, told)

    @staticmethod
    def within(
        *kinds: type[msgspec.Struct], harmless: str = "", **inside: "KnownFields"
    ) -> "KnownFields":
        """Those of an object within a body: of wire structs, and `harmless` names."""
        known = _names(*kinds) | set(harmless.split())
        return _made(known, known, {}, inside)

    def check(self, data: bytes) -> None:
        """Raises ApiError 400 `unknown_parameter` for a field that is meant as another or cannot be
        had here; tells the log which others are ignored. `data` is a JSON object."""
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
            elif not _is(value, b"null"):
                told = f"{kind}{name[:64]}"
                if told not in others:
                    self._require_other(name, value, path, compared=len(others) < MAX_COMPARED)
                others[told] = None

    def _require_other(self, name: str, value: msgspec.Raw, path: str, *, compared: bool) -> None:
        """Raises ApiError 400 unless the field may be ignored."""
        shown = f"{path}{name[:MAX_NAME]}"
        if name in self.refused:
            if not _is(value, *_NOTHING.get(name, _ASKS_NOTHING)):
                instead = self.refused[name]
                message = f"'{shown}' is not supported here{instead and ': '}{instead}."
                raise invalid(shown, message, "unknown_parameter")
        elif meant := self._meant(name, compared=compared):
            message = f"Unknown parameter: '{shown}'. Did you mean '{meant}'?"
            raise invalid(shown, message, "unknown_parameter")

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

    def _meant(self, name: str, *, compared: bool) -> str | None:
        if name in self.meant:
            return self.meant[name]
        if len(name) > MAX_NAME:
            return None
        squeezed = _squeeze(name)
        if squeezed in self._squeezed:
            return self._squeezed[squeezed]
        if not compared or name in _NO_SLIPS:
            return None
        least, nearest = 99, None
        for known, meant in self._squeezed.items():
            wrong = _difference(squeezed, known, _allowed(min(len(squeezed), len(known))))
            if wrong is not None and wrong < least:
                least, nearest = wrong, meant
        return nearest


def _made(
    known: frozenset[str] | set[str],
    matter: set[str] | frozenset[str],
    meant: Mapping[str, str],
    inside: Mapping[str, KnownFields] | None,
    refused: Mapping[str, str] | None = None,
) -> KnownFields:
    """Who slips on a name that does not matter loses nothing: only `matter` are compared."""
    squeezed = {_squeeze(name): here for name, here in sorted(meant.items())}
    squeezed |= {_squeeze(name): name for name in sorted(matter)}
    return KnownFields(frozenset(known), meant, inside or {}, refused or {}, squeezed)


def _names(*kinds: type[msgspec.Struct]) -> set[str]:
    return {each.encode_name for kind in kinds for each in msgspec.structs.fields(kind)}


def _is(value: msgspec.Raw, *texts: bytes) -> bool:
    """Whether it is one of some short texts; what is long is not copied for that."""
    view = memoryview(value)
    return view.nbytes <= 5 and bytes(view) in texts


def _begins(value: msgspec.Raw, mark: bytes) -> bool:
    return bytes(memoryview(value)[:1]) == mark


def _squeeze(name: str) -> str:
    """The name without what separates its words: `topP`, `top-p` and `topp` are one."""
    return _SEPARATORS.sub("", name).lower()


def _allowed(length: int) -> int:
    return next((most for least, most in _SLIPS if length >= least), 0)


def _difference(one: str, other: str, most: int) -> int | None:
    """How much is wrong in a name, by the counts of `_SLIPS`; None where it is over `most`: the
    optimal string alignment distance (Damerau, 1964)."""
    if abs(len(one) - len(other)) * _LETTER > most or len(set(one) ^ set(other)) > most:
        return None
    before: list[int] = []
    row = [column * _LETTER for column in range(len(other) + 1)]
    for line, letter in enumerate(one, 1):
        earlier, before = before, row
        row = [line * _LETTER]
        for column, against in enumerate(other, 1):
            same = before[column - 1] + (0 if letter == against else _OTHER_LETTER)
            best = min(same, before[column] + _LETTER, row[-1] + _LETTER)
            crossed = line > 1 and column > 1 and one[line - 2] == against
            if crossed and letter == other[column - 2]:
                best = min(best, earlier[column - 2] + _LETTER)
            row.append(best)
        if min(row) > most:
            return None
    return row[-1] if row[-1] <= most else None


CACHE_OPTIONS: Final = KnownFields.within(harmless="mode ttl prewarm comparison_response_id")
"""Of OpenAI's `prompt_cache_options`."""

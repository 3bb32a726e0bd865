"""Compiles one grammar in a process of its own, which it may exhaust or crash.

Reads {"grammar", "schemas": [[path, schema], …]} from standard input and writes {"error"} (empty
for a good grammar), then {"path"} of the schema's part that is at fault, a line each. It runs as
a script: what it imports is paid for with every grammar.
"""

import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

CPU_S = 1.0
MEMORY_BYTES = 1 << 30
WALK_STEPS = 24
ANY_BYTE = (1 << 256) - 1
STACK_BYTES = 1 << 20  # an eighth of what the engine's threads have
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class _Bytes:
    """A vocabulary of one token per byte."""

    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


class _Compiler:
    def __init__(self) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))

    def error(self, grammar: str) -> str:
        """Why the grammar cannot be used; "" where it can."""
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        self._walk(matcher)
        if not matcher.is_error():
            return ""
        error = matcher.get_error()
        return "nothing can match it" if error.startswith("NoExtension") else error

    def _walk(self, matcher: LLMatcher) -> None:
        """Take the first steps of an answer: some grammars exceed a limit only on the way, as a
        mask over whole tokens would at once."""
        for _ in range(WALK_STEPS):
            if matcher.is_error():
                return
            mask = int.from_bytes(matcher.compute_bitmask(), "little") & ANY_BYTE
            if not mask:
                return
            matcher.consume_token((mask & -mask).bit_length() - 1)

    def place(self, schema: Any, path: str) -> tuple[str, str]:
        """The path of the innermost part that fails as the whole does, and how it fails."""
        error = self._schema_error(schema)
        if not error:
            return "", ""
        around = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        inner = True
        while inner and isinstance(schema, dict):
            inner = False
            for step, child in _children(schema):
                if isinstance(child, dict) and self._schema_error({**around, **child}) == error:
                    schema, path, inner = child, f"{path}.{step}", True
                    break
        return path, error

    def _schema_error(self, schema: Any) -> str:
        return self.error(json.dumps({"grammars": [{"json_schema": schema}]}))


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SCHEMAS:
        if key in schema:
            yield key, schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}[{index}]", child) for index, child in enumerate(schema[key]))
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}.{name}", child) for name, child in schema[key].items())


def _say(value: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _work() -> None:
    asked = json.load(sys.stdin)
    compiler = _Compiler()
    error = compiler.error(asked["grammar"])
    _say({"error": error})
    if error:
        for path, schema in asked["schemas"]:
            place, its_error = compiler.place(schema, path)
            if place:
                _say({"path": place, "error": its_error})
                return


def main() -> None:
    """Run with bounds on memory, stack and the time this process computes; the last of them ends
    it with a signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

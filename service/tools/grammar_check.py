"""`GrammarChecker`: grammars are tried out in a helper process before the engine sees them."""

import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
from anyio import to_thread

from service.errors import ApiError, invalid

MAX_CHARACTERS: Final = 1 << 22
MAX_SECONDS: Final = 20.0  # on the clock; the helper itself computes for a second at most
MAX_REMEMBERED: Final = 512
_MAX_REASON: Final = 500
_NUM_HELPERS: Final = 2
_WORKER: Final = Path(__file__).with_name("grammar_worker.py")


@dataclass(frozen=True, slots=True)
class _Verdict:
    error: str = ""
    path: str = ""


class GrammarChecker:
    """Remembers what it has tried, as agents send the same schemas again and again."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._limiter = anyio.CapacityLimiter(_NUM_HELPERS)

    async def check(self, grammar: str, schemas: Sequence[tuple[str, Any]], path: str) -> None:
        """Raises ApiError 400 for a grammar that the engine cannot use, with the path of the part
        at fault: `path`, or a place in one of `schemas` (path and schema).

        A helper works off the event loop, at most two at a time. Cancelling a call lets its
        helper end by itself.
        """
        places = json.dumps([name for name, _ in schemas])  # each dialect has names of its own
        key = hashlib.sha256(f"{places}{grammar}".encode("utf-8", "surrogatepass")).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await to_thread.run_sync(
                _try_out, grammar, schemas, abandon_on_cancel=True, limiter=self._limiter
            )
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_REMEMBERED:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(key)
        if verdict.error:
            raise _refused(verdict.path or path, verdict.error)


def _refused(path: str, reason: str) -> ApiError:
    return invalid(path, f"Invalid '{path}': {reason[:_MAX_REASON]}")


def _try_out(grammar: str, schemas: Sequence[tuple[str, Any]]) -> _Verdict:
    if len(grammar) > MAX_CHARACTERS:
        return _Verdict(f"all schemas together are longer than {MAX_CHARACTERS} characters")
    try:
        helper = subprocess.run(
            [sys.executable, "-I", str(_WORKER)],
            input=json.dumps({"grammar": grammar, "schemas": list(schemas)}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Verdict("it takes too long to compile")
    said: dict[str, str] = {}
    for line in helper.stdout.splitlines():
        said |= json.loads(line)
    if "error" not in said:
        return _Verdict("it is too large or too deep to compile")
    return _Verdict(said["error"], said.get("path", ""))

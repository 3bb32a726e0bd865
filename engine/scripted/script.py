"""Scripts: what the test engine says in place of a model, given in Python or in a JSON file."""

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from engine.api import EngineError
from engine.types import EngineInfo, EngineRequest, FinishReason, TokenLogprobs

DEFAULT_TEXT = "The river remembers every stone it has passed. "


class ScriptStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that arrive together, `delay_s` after the step before.

    Their bytes come from the core's vocabulary, or are `text` as a whole. `logprobs` are given one
    per token, or made up where a request asks for them. `error` ends the request with ERROR in
    place of the tokens; `crash` raises out of the core, as a fault that no request owns would.
    """

    token_ids: tuple[int, ...] = ()
    delay_s: Annotated[float, Meta(ge=0.0)] = 0.0
    text: bytes | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    crash: str = ""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request gets. After `steps` it ends with `finish`, or never if that is None;
    `repeat` says them again and again instead, until the request's own limits end it."""

    steps: tuple[ScriptStep, ...] = ()
    finish: FinishReason | None = FinishReason.STOP
    repeat: bool = False
    num_cached_tokens: Annotated[int, Meta(ge=0)] = 0

    def check(self) -> None:
        """Raises ValueError for a script that cannot be played."""
        if self.repeat and not any(step.token_ids for step in self.steps):
            raise ValueError("a script that repeats needs tokens")
        for step in self.steps:
            if step.logprobs and len(step.logprobs) != len(step.token_ids):
                raise ValueError("a step gives logprobs for all of its tokens or for none")
            if not math.isfinite(step.delay_s):
                raise ValueError("a step's delay is not finite")


ScriptFor: TypeAlias = Callable[[EngineRequest], Script]


class ScriptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file of the scripted backend; every field may be left out.

    Each request gets `text` with one token per byte, again and again until `num_tokens` (0: until
    its max_tokens). With `scripts`, the n-th request gets the n-th of them, round and round.
    `step_s` is the core's.
    """

    text: Annotated[str, Meta(min_length=1)] = DEFAULT_TEXT
    tokens_per_step: Annotated[int, Meta(ge=1)] = 1
    delay_s: Annotated[float, Meta(ge=0.0)] = 0.01
    step_s: Annotated[float, Meta(ge=0.0)] = 0.0
    num_tokens: Annotated[int, Meta(ge=0)] = 0
    scripts: tuple[Script, ...] = ()
    model_name: str = "scripted"
    vocab_size: Annotated[int, Meta(ge=256)] = 49152
    max_context: Annotated[int, Meta(ge=2)] = 131072
    num_pages: Annotated[int, Meta(ge=1)] = 65536

    def script_for(self) -> ScriptFor:
        """The function that hands out this file's scripts."""
        if self.scripts:
            return in_order(self.scripts, repeat=True)
        data = self.text.encode()
        if self.num_tokens:
            data = (data * math.ceil(self.num_tokens / len(data)))[: self.num_tokens]
        script = text_script(data, self.tokens_per_step, self.delay_s, repeat=not self.num_tokens)
        return lambda request: script

    def info(self, page_size: int) -> EngineInfo:
        """What an engine that plays this file says of itself."""
        return EngineInfo(
            model_name=self.model_name,
            model_digest="scripted",
            family="scripted",
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            page_size=page_size,
            num_pages=self.num_pages,
            page_bytes=0,
            backend="scripted",
            numeric_mode="none",
            threads=1,
        )


def read_script_file(path: str) -> ScriptFile:
    """The file at `path`; the built-in sentence for an empty path. Raises EngineError with a
    sentence for a file that cannot be read or played."""
    if not path:
        return ScriptFile()
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=ScriptFile)
        for script in file.scripts:
            script.check()
    except OSError as error:
        raise EngineError(f"the script {path} cannot be read: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise EngineError(f"the script {path} cannot be played: {error}") from error
    return file


def byte_token(token_id: int) -> bytes:
    """The vocabulary of one token per byte; ids from 256 on have no bytes."""
    return bytes([token_id]) if token_id < 256 else b""


def text_script(
    text: str | bytes,
    tokens_per_step: int = 1,
    delay_s: float = 0.0,
    *,
    finish: FinishReason | None = FinishReason.STOP,
    repeat: bool = False,
) -> Script:
    """A script of `text` in the vocabulary of `byte_token`, grouped evenly."""
    data = text.encode() if isinstance(text, str) else text
    starts = range(0, len(data), tokens_per_step)
    steps = tuple(
        ScriptStep(tuple(data[start : start + tokens_per_step]), delay_s) for start in starts
    )
    return Script(steps, finish, repeat)


def in_order(scripts: Iterable[Script], *, repeat: bool = False) -> ScriptFor:
    """The n-th request gets the n-th script; one too many is a LookupError."""
    following = itertools.cycle(scripts) if repeat else iter(scripts)

    def script_for(request: EngineRequest) -> Script:
        script = next(following, None)
        if script is None:
            raise LookupError(f"no script is left for request {request.id!r}")
        return script

    return script_for

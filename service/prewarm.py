"""Prompts that are computed for the cache alone: by request, or from a file before the start."""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from engine.types import SHARED_TENANT
from service.access.keys import KeyFile
from service.conversation import Conversation, GenerationOptions, GenerationRequest
from service.dialects import wire
from service.dialects.chat_decode import ChatBody
from service.dialects.chat_messages import INSIDE_PROMPT, Prompt, decode_conversation
from service.dialects.fields import CacheSalt, Name
from service.dialects.known_fields import KnownFields
from service.dialects.sampling import SHARED_HARMLESS, SamplingBody
from service.errors import ApiError, from_failure, invalid
from service.events import Completed, Failed, RequestRecord
from service.services import Services

MAX_CHARACTERS: Final = 1 << 22
MAX_TOKENS: Final = 1 << 20
MAX_TTL_S: Final = 7 * 86_400
TTL_NAMES: Final = {"ttl_s": "ttl", "ttl_seconds": "ttl"}
"""What answers call it, and what one may take it for."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TTL: Final = re.compile(r"(\d{1,6})([smhd])")

Ttl = str | Annotated[float, Meta(gt=0, le=MAX_TTL_S)]

log = logging.getLogger(__name__)


class PromptBody(Prompt, frozen=True, kw_only=True):
    """One of `messages` (with `tools`) and `prompt`, a text or token ids."""

    model: Name | None = None
    prompt: (
        Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
        | Annotated[list[int], Meta(min_length=1, max_length=MAX_TOKENS)]
        | None
    ) = None
    cache_salt: CacheSalt | None = None


class WarmBody(PromptBody, frozen=True, kw_only=True):
    """A prompt to compute now; with `ttl` its prefix is leased."""

    ttl: Ttl | None = None


class _Line(WarmBody, frozen=True, kw_only=True):
    """A line of a file of prompts; with keys, `tenant` is whose prompt it is."""

    tenant: Annotated[str, Meta(min_length=1)] | None = None


def _fields(kind: type[PromptBody]) -> KnownFields:
    """Of a body; what a whole chat body has beyond its prompt changes nothing here."""
    return KnownFields.of(
        kind,
        ChatBody,
        SamplingBody,
        harmless=SHARED_HARMLESS,
        system="messages",
        meant={"salt": "cache_salt", **TTL_NAMES},
        inside=INSIDE_PROMPT,
    )


FIELDS: Final = _fields(WarmBody)
_LINE_FIELDS: Final = _fields(_Line)


class PrewarmError(Exception):
    """A file of prompts that cannot be computed; the message names the file and the line."""


async def read_prompt(
    body: PromptBody, services: Services, *, as_prefix: bool = False
) -> tuple[Conversation, NDArray[np.int32]]:
    """What the prompt is, and its tokens; `as_prefix`: those that later prompts begin with. An
    answer follows a user's message or a tool's result; behind any other stands another message.
    Raises ApiError."""
    if body.model is not None:
        services.card.require(body.model)
    _require_one(body)
    if body.prompt is None:
        conversation = decode_conversation(body)
        if as_prefix and conversation.messages[-1].role not in ("user", "tool"):
            conversation = replace(conversation, asks_answer=False)
        return conversation, (await services.renderer.render(conversation)).token_ids
    if isinstance(body.prompt, str):
        return Conversation(()), await services.renderer.tokenize(body.prompt, True)
    size = services.card.vocab_size
    for index, token_id in enumerate(body.prompt):
        if not 0 <= token_id < size:
            raise invalid(f"prompt[{index}]", f"Token ids are 0 to {size - 1} in this model.")
    return Conversation(()), np.array(body.prompt, dtype=np.int32)


def _require_one(body: PromptBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Give either 'prompt' or 'messages'.")


async def warm(
    services: Services, body: WarmBody, record: RequestRecord, default_ttl_s: float | None = None
) -> Completed:
    """Compute a prompt and say no word after it; its usage has the cache's summary and, where a
    time to live is given, the lease. Raises ApiError."""
    ttl_s = default_ttl_s if body.ttl is None else seconds(body.ttl)
    conversation, token_ids = await read_prompt(body, services, as_prefix=True)
    request = GenerationRequest(
        id=f"warm-{secrets.token_hex(16)}",
        model=services.card.id,
        conversation=conversation,
        options=GenerationOptions(
            max_tokens=0, salt=body.cache_salt or "", keep_s=ttl_s, cache_report=True
        ),
    )
    end: Completed | None = None
    try:
        async with aclosing(services.generator.run_tokens(request, token_ids, record)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise from_failure(event)
                if isinstance(event, Completed):
                    end = event
    except ApiError as error:
        if body.prompt is not None and error.param in ("messages", "token_ids"):
            error.param = "prompt"
        raise
    assert end is not None  # the path's contract: exactly one terminal event
    return end


@dataclass(frozen=True, slots=True)
class PrewarmLine:
    """A prompt of a file, where it stands, and whose requests are to find it."""

    place: str
    body: WarmBody
    tenant: str


def read_prewarm(path: Path, keys: KeyFile | None = None) -> list[PrewarmLine]:
    """The prompts of a file, a JSON object like the body of `POST /v1/cache/prewarm` in each line;
    with keys each also has the `tenant` whose requests are to find it, as nobody finds another's.
    Needs no engine; what only the model knows (its name, its tokens) is left to `warm_lines`.
    Raises PrewarmError for the first that is wrong."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PrewarmError(f"--prewarm {path}: {error.strerror or error}.") from error
    prompts: list[PrewarmLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"--prewarm {path}, line {number}"
        try:
            _LINE_FIELDS.check(line)
            body = wire.decode(line, _Line)
            tenant = _tenant(body.tenant, keys)
            _require_one(body)
            if body.messages is not None:
                decode_conversation(body)
            if body.ttl is not None:
                seconds(body.ttl)
        except ApiError as error:
            raise PrewarmError(f"{place}: {error.message}") from error
        prompts.append(PrewarmLine(place, body, tenant))
    return prompts


async def warm_lines(services: Services, lines: Sequence[PrewarmLine]) -> None:
    """Compute the prompts of a file. Raises PrewarmError for the first that cannot be."""
    for line in lines:
        record = RequestRecord(
            operation="prewarm",
            model=services.card.id,
            start_ns=time.monotonic_ns(),
            tenant=line.tenant,
        )
        try:
            end = await warm(services, line.body, record)
        except ApiError as error:
            raise PrewarmError(f"{line.place}: {error.message}") from error
        usage = end.usage
        told = (usage.prompt_tokens, usage.cached_tokens, record.trace_id)
        log.info("prewarmed %d tokens, %d cached trace=%s", *told)


def _tenant(asked: str | None, keys: KeyFile | None) -> str:
    if keys is None:
        if asked is not None:
            raise invalid("tenant", "There are no tenants without --keys: leave out 'tenant'.")
        return SHARED_TENANT
    if asked is None:
        raise invalid("tenant", "With --keys, 'tenant' says whose requests find the prompt.")
    if asked not in keys.tenants:
        raise invalid("tenant", f"No key is of the tenant {asked!r}.")
    return asked


def seconds(ttl: str | float, param: str = "ttl") -> float:
    """Seconds, or a text like "90s", "5m", "12h", "2d". Raises ApiError 400."""
    if not isinstance(ttl, str):
        return float(ttl)
    match = _TTL.fullmatch(ttl)
    given = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < given <= MAX_TTL_S:
        raise invalid(param, f"Invalid '{param}': seconds, or like '5m', '1h', at most '7d'.")
    return float(given)

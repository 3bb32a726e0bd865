"""What an engine refuses at the call, so that no user input reaches an assertion of the loop."""

import re

import msgspec

from engine.api import RequestRefused
from engine.types import EngineInfo, EngineRequest, SamplingParams, unpack_tokens

MAX_ID_CHARS = 256
MAX_STOPS = 64
"""Stop strings, and stop tokens, of one request."""
MAX_STOP_BYTES = 1024
MAX_CREDITS = 65536
"""Tokens of one request that may wait for its reader."""

_decode = msgspec.msgpack.Decoder(EngineRequest).decode
_encode = msgspec.msgpack.Encoder().encode
_INDEX = re.compile(r"\[(\d+)\]")


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raises RequestRefused, naming the field by its path in EngineRequest, for a request that an
    engine described by `info` can never serve."""
    _check_types(request)
    if not 0 < len(request.id) <= MAX_ID_CHARS:
        raise RequestRefused(f"the id must have 1 to {MAX_ID_CHARS} characters", "id")
    if not 1 <= request.credits <= MAX_CREDITS:
        raise RequestRefused(f"credits must be 1 to {MAX_CREDITS}", "credits")
    if request.deadline_ns < 0:
        raise RequestRefused("the deadline must not be negative", "deadline_ns")
    _check_prompt(request, info)
    _check_stops(request.sampling, info)


def _check_types(request: EngineRequest) -> None:
    """Types and ranges are those declared in engine.types: what would not decode is refused."""
    try:
        _decode(_encode(request))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        raise RequestRefused(reason, _field(path)) from None
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise RequestRefused(str(error), _unencodable(request)) from None


def _field(path: str) -> str:
    """`$[2][1]`, a path of array indices, as `sampling.temperature`."""
    indices = [int(index) for index in _INDEX.findall(path)]
    name = EngineRequest.__struct_fields__[indices[0]]
    if name == "sampling" and len(indices) > 1:
        return f"{name}.{SamplingParams.__struct_fields__[indices[1]]}"
    return name


def _unencodable(request: EngineRequest) -> str:
    """The path of the field that msgpack cannot carry."""
    for prefix, value in (("sampling.", request.sampling), ("", request)):
        for name in value.__struct_fields__:
            try:
                _encode(getattr(value, name))
            except (UnicodeEncodeError, OverflowError, TypeError):
                return prefix + name
    raise AssertionError("the whole failed to encode, but each field encodes")


def _check_prompt(request: EngineRequest, info: EngineInfo) -> None:
    if len(request.token_ids) % 4:
        raise RequestRefused("token ids must be int32 values of 4 bytes each", "token_ids")
    token_ids = unpack_tokens(request.token_ids)
    num_tokens = len(token_ids)
    if not num_tokens:
        raise RequestRefused("the prompt is empty", "token_ids")
    if num_tokens >= info.max_context:
        raise RequestRefused(
            f"the prompt has {num_tokens} tokens; with a context of {info.max_context} tokens, "
            f"at most {info.max_context - 1} leave room for an answer",
            "token_ids",
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= info.vocab_size:
        raise RequestRefused(
            f"token id {low if low < 0 else high} is outside the vocabulary: "
            f"ids are 0 to {info.vocab_size - 1}",
            "token_ids",
        )
    _check_pages(num_tokens, request.sampling.max_tokens, info)


def _check_pages(num_prompt: int, max_tokens: int, info: EngineInfo) -> None:
    """The longest this request may get must fit into the pool while nothing else runs. The last
    sampled token is never computed, so it needs no slot."""
    capacity = info.num_pages * info.page_size
    if num_prompt > capacity:
        raise RequestRefused(
            f"the prompt has {num_prompt} tokens; the KV memory holds {capacity}", "token_ids"
        )
    longest = max(num_prompt, min(num_prompt + max_tokens, info.max_context) - 1)
    if longest > capacity:
        raise RequestRefused(
            f"{num_prompt} prompt tokens and {max_tokens} more can never fit: "
            f"the KV memory holds {capacity} tokens",
            "sampling.max_tokens",
        )


def _check_stops(sampling: SamplingParams, info: EngineInfo) -> None:
    if len(sampling.stop) > MAX_STOPS:
        raise RequestRefused(f"at most {MAX_STOPS} stop strings are allowed", "sampling.stop")
    for stop in sampling.stop:
        if not 0 < len(stop) <= MAX_STOP_BYTES:
            raise RequestRefused(
                f"a stop string must have 1 to {MAX_STOP_BYTES} bytes", "sampling.stop"
            )
    if len(sampling.stop_token_ids) > MAX_STOPS:
        raise RequestRefused(
            f"at most {MAX_STOPS} stop tokens are allowed", "sampling.stop_token_ids"
        )
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise RequestRefused(
                f"stop token {token_id} is outside the vocabulary: "
                f"ids are 0 to {info.vocab_size - 1}",
                "sampling.stop_token_ids",
            )

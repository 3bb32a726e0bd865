"""What an engine refuses at the call, so that no user input reaches an assertion of the loop."""

import re

import msgspec

from engine.api import RequestRefused
from engine.types import MAX_BIASES, EngineInfo, EngineRequest, SamplingParams, unpack_tokens

MAX_ID_CHARS = 256
MAX_STOPS = 64
"""Stop strings, and stop tokens, of one request."""
MAX_STOP_BYTES = 1024
MAX_GRAMMAR_CHARACTERS = 1 << 22
MAX_CREDITS = 65536
"""Tokens of one request that may wait for its reader."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of one request's prompt, alternatives included: they need no credit."""

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
    _check_logit_rules(request.sampling, info)
    if len(request.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RequestRefused(
            f"the grammar is longer than {MAX_GRAMMAR_CHARACTERS} characters", "grammar"
        )


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
    num_tokens = _check_tokens(request.token_ids, "token_ids", info)
    if not num_tokens:
        raise RequestRefused("the prompt is empty", "token_ids")
    if num_tokens >= info.max_context:
        raise RequestRefused(
            f"the prompt has {num_tokens} tokens; with a context of {info.max_context} tokens, "
            f"at most {info.max_context - 1} leave room for an answer",
            "token_ids",
        )
    num_predicted = _check_tokens(request.prediction, "prediction", info)
    if num_predicted > info.max_context:
        raise RequestRefused(
            f"the prediction has {num_predicted} tokens, more than the context of "
            f"{info.max_context}",
            "prediction",
        )
    _check_pages(num_tokens, request.sampling.max_tokens, info)
    num_top = request.sampling.prompt_logprobs
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise RequestRefused(
            f"{num_top} alternatives for each of {num_tokens} prompt tokens are more than "
            f"{MAX_PROMPT_LOGPROBS} log-probabilities",
            "sampling.prompt_logprobs",
        )


def _check_tokens(packed: bytes, name: str, info: EngineInfo) -> int:
    """How many there are. They are all of the vocabulary."""
    if len(packed) % 4:
        raise RequestRefused("token ids must be int32 values of 4 bytes each", name)
    token_ids = unpack_tokens(packed)
    if token_ids.size:
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= info.vocab_size:
            raise RequestRefused(
                f"token id {low if low < 0 else high} is outside the vocabulary: "
                f"ids are 0 to {info.vocab_size - 1}",
                name,
            )
    return token_ids.size


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
    _check_ids(sampling.stop_token_ids, "stop_token_ids", info)


def _check_logit_rules(sampling: SamplingParams, info: EngineInfo) -> None:
    """The tokens that are named exist, and there are not too many."""
    ids = {
        "logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
    }
    for name, token_ids in ids.items():
        if len(token_ids) > MAX_BIASES:
            raise RequestRefused(f"at most {MAX_BIASES} tokens are allowed", f"sampling.{name}")
        _check_ids(token_ids, name, info)


def _check_ids(token_ids: tuple[int, ...], name: str, info: EngineInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise RequestRefused(
                f"token {token_id} is outside the vocabulary: ids are 0 to {info.vocab_size - 1}",
                f"sampling.{name}",
            )

"""What the engine is asked for a generation: its `EngineRequest`, within the context."""

import secrets

from engine.types import EngineInfo, EngineRequest, KeepPrefix, SamplingParams, pack_tokens
from service.conversation import (
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_P,
    GenerationOptions,
    GenerationRequest,
)
from service.errors import context_exceeded
from service.events import RequestRecord
from service.prompts import RenderedPrompt

SEED_BITS = 63


def engine_request(
    request: GenerationRequest,
    prompt: RenderedPrompt,
    record: RequestRecord,
    info: EngineInfo,
    *,
    grammar: str,
    prediction: bytes,
    shown_token_ids: tuple[int, ...],
    weight: float,
) -> EngineRequest:
    """What the engine is to do; the record gets the options that it will have.

    `grammar` is what the answer must follow, `prediction` are the packed ids that are expected of
    it, `shown_token_ids` are special tokens that it may show, `weight` is the tenant's. Raises
    ApiError 400 `context_length_exceeded`.
    """
    options, token_ids = request.options, prompt.token_ids
    sampling = _sampling(options, len(token_ids), info)
    _tell(record, options, sampling)
    # A deadline of 0 means none, so the shortest timeout is a nanosecond.
    timeout_ns = max(1, int(options.timeout_s * 1e9)) if options.timeout_s else 0
    whole = () if options.keep_s is None else (KeepPrefix(-1, options.keep_s),)
    return EngineRequest(
        id=request.id,
        token_ids=pack_tokens(token_ids),
        sampling=sampling,
        tenant=record.tenant,
        salt=options.salt,
        priority=options.priority,
        weight=weight,
        deadline_ns=record.start_ns + timeout_ns if timeout_ns else 0,
        shown_token_ids=shown_token_ids,
        grammar=grammar,
        keep=(*prompt.kept, *whole),
        trace_id=record.trace_id,
        prediction=prediction,
    )


def _tell(record: RequestRecord, options: GenerationOptions, sampling: SamplingParams) -> None:
    """Note the options that a trace shows; what the client did not ask for is not told as if it
    had."""
    record.options.update(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
    if options.top_k:
        record.options["top_k"] = options.top_k
    if options.seed is not None:
        record.options["seed"] = options.seed
    if options.stop:
        record.options["stop_sequences"] = list(options.stop)
    if options.frequency_penalty:
        record.options["frequency_penalty"] = options.frequency_penalty
    if options.presence_penalty:
        record.options["presence_penalty"] = options.presence_penalty


def _sampling(
    options: GenerationOptions, num_prompt_tokens: int, info: EngineInfo
) -> SamplingParams:
    max_tokens = _max_tokens(options, num_prompt_tokens, info)
    temperature = options.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if temperature is None else temperature,
        top_k=options.top_k or 0,
        top_p=DEFAULT_TOP_P if options.top_p is None else options.top_p,
        min_p=options.min_p or 0.0,
        seed=secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
        stop=tuple(stop.encode() for stop in options.stop),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        repetition_penalty=options.repetition_penalty or 1.0,
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
        min_tokens=options.min_tokens,
        include_stop=options.include_stop,
        prompt_logprobs=options.prompt_logprobs,
    )


def _max_tokens(options: GenerationOptions, num_prompt_tokens: int, info: EngineInfo) -> int:
    """Raises ApiError 400 `context_length_exceeded` with both numbers."""
    limit = info.max_context
    asked = options.max_tokens
    needed = 1 if asked is None or options.fit_max_tokens else asked
    if num_prompt_tokens + needed > limit:
        raise context_exceeded(
            "messages" if num_prompt_tokens >= limit else "max_tokens",
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + needed} tokens ({num_prompt_tokens} in the prompt, "
            f"{needed} for the completion).",
        )
    if asked is not None and not options.fit_max_tokens:
        return asked
    left = max(1, min(limit, info.num_pages * info.page_size) - num_prompt_tokens)
    return left if asked is None else min(asked, left)

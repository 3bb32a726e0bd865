"""Frozen values that cross the border between the edge and the engine.

All times are nanoseconds of the machine's monotonic clock (`time.monotonic_ns`, the same in every
process). Token ids travel as little-endian int32 bytes.
"""

import struct
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
"""Entries of `logit_bias`, and of `allowed_token_ids`, of one request."""
SHARED_TENANT = "public"


def pack_tokens(token_ids: NDArray[np.int32] | list[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    if isinstance(token_ids, list):
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes | bytearray) -> NDArray[np.int32]:
    """The inverse of `pack_tokens`, without a copy, read-only."""
    return np.frombuffer(data, dtype="<i4")


class FinishReason(StrEnum):
    """Why a request ended; every request ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are chosen and when generation ends.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. A draw depends on `seed` and
    the token's position alone, so the same seed gives the same tokens whatever else is in the
    batch. `stop` are byte strings matched on token bytes; matched text is not released.
    logprobs is None for none, else how many alternatives go with each token (0: only the token).
    max_tokens 0 computes the prompt and samples nothing.

    What changes logits does so in this order: `repetition_penalty` (of tokens in prompt and output:
    positive logits are divided by it, others multiplied), `frequency_penalty` (times the token's
    count in the output) and `presence_penalty` (if it is there) are subtracted, `logit_bias` is
    added, all but `allowed_token_ids` (empty: no limit) are ruled out, and what would end the
    request is, before `min_tokens`, unless nothing else is left. Then temperature and filters.
    Log-probabilities are those of the model itself, before all that.
    `include_stop` shows the stop string or stop token that ended the request.
    `prompt_logprobs` asks for PromptLogprobs, with as many alternatives; nothing of the prompt is
    taken from the cache then, as scored positions are computed.
    """

    max_tokens: Annotated[int, Meta(ge=0)]
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    logit_bias: tuple[tuple[int, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    include_stop: bool = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class KeepPrefix(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a lease of the prompt's first `num_tokens` (-1: of all), once they are computed."""

    num_tokens: Annotated[int, Meta(ge=-1)]
    ttl_s: Annotated[float, Meta(gt=0.0, le=7 * 86_400.0)]


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """What the edge asks of the engine. `id` is unique among running requests.

    `tenant` comes from the credential and `salt` from the body: both narrow the cache namespace.
    A lower `priority` is served earlier. Tenants of one priority share the engine in proportion to
    `weight`, which comes from the credential too. `deadline_ns` 0 is none. `credits` is how many
    tokens may be sent before the reader returns some: a sequence without credit pauses, alone.
    `shown_token_ids` are special tokens whose literal text is released, as others' is not.
    `grammar` is what the output must match, as llguidance serialises grammars; "" for anything.
    `keep` asks for leases of the prompt's prefixes, told with its Finished. `trace_id` is what log
    lines of the request name it by, beside its id. `prediction` are tokens that the answer is
    expected to have, packed as `token_ids`: they may make it faster, and change nothing of it.
    """

    id: str
    token_ids: bytes
    sampling: SamplingParams
    tenant: str = SHARED_TENANT
    salt: str = ""
    priority: int = 0
    deadline_ns: int = 0
    credits: int = 256
    shown_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    weight: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0
    keep: Annotated[tuple[KeepPrefix, ...], Meta(max_length=8)] = ()
    trace_id: Annotated[str, Meta(max_length=32)] = ""
    prediction: bytes = b""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the likeliest alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class CacheReport(msgspec.Struct, frozen=True, array_like=True):
    """What of a prompt came from the cache, and why not more.

    `num_cached_tokens` includes those that another request computed while this one waited for
    them (`num_in_flight_tokens`). `reason`, one of `prefix_cache.explain.MissReason`, is empty
    where all that was ever stored of the prompt was found. `position` is that of the first token
    that was not found; `stored` has a few of the tokens that the same namespace holds there
    instead, packed. `evicted_ago_s` goes with "evicted".
    """

    num_cached_tokens: int
    num_in_flight_tokens: int = 0
    num_disk_tokens: int = 0
    reason: str = ""
    position: int = 0
    stored: bytes = b""
    evicted_ago_s: float = 0.0


class LeaseInfo(msgspec.Struct, frozen=True, array_like=True):
    """A lease: `num_tokens` of the `num_tokens_asked` first tokens of a prefix are held for
    `remaining_s`, and for `ttl_s` from each hit on. `id` is empty where nothing was granted."""

    id: str
    num_tokens: int
    num_tokens_asked: int
    ttl_s: float
    remaining_s: float
    num_hits: int = 0
    salt: str = ""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The request was admitted: its prefix is matched and its first chunk is planned."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_ns: int
    cache: CacheReport | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """The prompt's tokens from position `start` on, each scored by what stands before it. A
    prompt is told in order and without gaps, from position 1 to its end, before any TokenDelta.
    """

    request_id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]
    time_ns: int


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """Tokens of one step. `text` holds the bytes that may be shown now: no character of a stop
    string leaks, so it can be shorter or longer than the bytes of `token_ids`, or empty.
    `logprobs` has one entry per token where they were asked for, else it is empty.
    """

    request_id: str
    token_ids: bytes
    text: bytes
    time_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()


LEAST_SHARE: Final = 3
"""What is used less than to one part in so many is not what the kernels wait for."""


class Verdict(StrEnum):
    """What a stretch of computing waited for most."""

    COMPUTE = "compute-bound"
    BANDWIDTH = "bandwidth-bound"
    HOST = "host-bound"
    NEITHER = "neither"
    UNKNOWN = "unknown"


def judge(wall_ns: int, kernel_ns: int, memory_ns: int, compute_ns: int) -> Verdict:
    """HOST where more time went beside the kernels than in them. Else what the kernels wait for:
    the memory, or the units that multiply, whichever needs longer at its best for the bytes that
    had to move or the operations; how far from their best they were is no reason to blame the host,
    but NEITHER is the limit where the kernels used less than a third of both: small pieces of work,
    or cores that others used. UNKNOWN where the machine was not measured, or nothing was
    computed."""
    if not kernel_ns or not (memory_ns or compute_ns):
        return Verdict.UNKNOWN
    if wall_ns - kernel_ns >= kernel_ns:
        return Verdict.HOST
    if max(memory_ns, compute_ns) * LEAST_SHARE < kernel_ns:
        return Verdict.NEITHER
    return Verdict.BANDWIDTH if memory_ns >= compute_ns else Verdict.COMPUTE


class Phase(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of a request's life: queue, prefix_match, prefill, decode; disjoint, in order.

    Of the steps in it: `kernel_ns` is how long they computed, `memory_ns` how long their bytes
    take at the machine's bandwidth, `compute_ns` their operations at its rate; 0 where the machine
    was not measured. A step is shared by its requests. Of the tokens that a prefix_match found,
    `num_disk_tokens` were brought back from disk for it.
    """

    name: str
    start_ns: int
    end_ns: int
    num_tokens: int = 0
    start_position: int = 0
    kernel_ns: int = 0
    memory_ns: int = 0
    compute_ns: int = 0
    num_disk_tokens: int = 0

    @property
    def verdict(self) -> Verdict:
        return judge(self.end_ns - self.start_ns, self.kernel_ns, self.memory_ns, self.compute_ns)


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The terminal event: exactly one per request, nothing follows it.

    `stop` is the matched stop string, `stop_token_id` the token that ended it (else -1); `message`
    says what failed for ERROR, and `retryable` that nothing was wrong with the request itself: the
    engine stopped, or takes no more. `donor` is the request that computed the last of the cached
    tokens, where there are some. `num_draft_tokens` were computed because they might come next, and
    `num_accepted_tokens` of them did.
    """

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_ns: int
    num_preemptions: int = 0
    stop: bytes = b""
    stop_token_id: int = -1
    message: str = ""
    phases: tuple[Phase, ...] = ()
    donor: str = ""
    retryable: bool = False
    leases: tuple[LeaseInfo, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """What of a request says how long it has to wait."""

    tenant: str
    weight: float
    priority: int
    num_tokens: int


EngineEvent: TypeAlias = Started | PromptLogprobs | TokenDelta | Finished


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine process is set up. Zero means: choose from the machine and the model.

    `model` is a GGUF file or a Hugging Face folder. `token_budget` bounds new tokens per step;
    `decode_token_budget`, unless 0, does while other sequences decode, instead of any time.
    `itl_target_ms` is the time between tokens that is kept, `ttft_target_ms` that to the first
    token, which is promised by refusing what could not keep it; 0 for none. `max_waiting` requests
    with `max_waiting_tokens` prompt tokens may wait, more are refused. `kv_dtype` is how pages hold
    keys and values: f16, int8, or auto, the backend's own way. `cache_dir` keeps what is cached
    from one engine to the next; "" for nothing. What is evicted is kept on disk, up to
    `cache_disk_bytes`. The cache is audited `idle_audit_s` after the last request ended; 0 for
    never. With `speculation` steps also compute what may come next, where that pays. With `warm_up`
    it computes something before it says that it is ready, so that what steps cost is known. The
    peaks are this machine's, as in EngineInfo, where they are known already.
    """

    model: str
    kv_memory_bytes: int = 0
    max_context: int = 0
    threads: int = 0
    exact: bool = False
    kv_dtype: str = "auto"
    backend: str = "auto"
    page_size: int = 16
    token_budget: int = 512
    decode_token_budget: int = 0
    itl_target_ms: float = 0.0
    ttft_target_ms: float = 0.0
    max_running: int = 64
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    cache_dir: str = ""
    cache_disk_bytes: int = 0
    idle_audit_s: float = 1.0
    speculation: bool = True
    log_level: str = "info"
    warm_up: bool = True
    peak_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is. `kv_dtype` is how pages hold keys and values, "" where there are
    none. The peaks are this machine's as measured, 0 where they are not known."""

    model_name: str
    model_digest: str
    family: str
    vocab_size: int
    max_context: int
    page_size: int
    num_pages: int
    page_bytes: int
    backend: str
    numeric_mode: str
    threads: int
    kv_dtype: str = ""
    peak_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0


class ExplainPrompt(msgspec.Struct, frozen=True, array_like=True, tag="explain"):
    """What the cache would have of a prompt now; answered by CacheReport."""

    tenant: str
    salt: str
    token_ids: bytes


class ListLeases(msgspec.Struct, frozen=True, array_like=True, tag="leases"):
    """The tenant's leases."""

    tenant: str


class ExtendLease(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """Let a lease of the tenant end `ttl_s` from now; answered by it, or by none."""

    tenant: str
    id: str
    ttl_s: float


class ReleaseLease(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """End a lease of the tenant; answered by it, or by none."""

    tenant: str
    id: str


CacheCall: TypeAlias = ExplainPrompt | ListLeases | ExtendLease | ReleaseLease
CacheAnswer: TypeAlias = CacheReport | tuple[LeaseInfo, ...]


class CacheEventInfo(msgspec.Struct, frozen=True, array_like=True):
    """What became cached or ceased to be, see `prefix_cache.events.CacheEvent`."""

    kind: str
    tenant: str
    salt: str
    pages: tuple[bytes, ...]
    parent: bytes = b""
    lease_id: str = ""
